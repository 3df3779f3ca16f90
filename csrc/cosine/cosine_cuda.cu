// Pairwise cosine on the GPU: one warp per row, or one block per row if there are few rows. Forward and backward each
// read every row once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../cuda_check.h"
#include "cosine.h"

namespace raoe {
namespace {

constexpr int BLOCK = 128;
// Up to this many rows, use one block per row: an H200 holds 8,448 warps, and a warp per row would leave most idle.
constexpr std::int64_t FEW_ROWS = 2048;

__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

__device__ __forceinline__ void narrow(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
__device__ __forceinline__ void narrow(float x, float& y) { y = x; }
__device__ __forceinline__ void narrow(double x, double& y) { y = x; }

// The elements that a thread loads or stores at once.
template <class T, int WIDTH>
struct alignas(WIDTH * sizeof(T)) Pack {
  T at[WIDTH];
};

template <class T, int WIDTH>
__device__ __forceinline__ Pack<T, WIDTH> read(const T* row, std::int64_t k) {
  return *reinterpret_cast<const Pack<T, WIDTH>*>(row + k);
}

template <class T, int WIDTH>
__device__ __forceinline__ void write(T* row, std::int64_t k, const Pack<T, WIDTH>& values) {
  *reinterpret_cast<Pack<T, WIDTH>*>(row + k) = values;
}

// Sum three values over the LANES threads of a row (a warp or the block). Every thread gets the sums.
template <int LANES, class W>
__device__ __forceinline__ void sum_over_row(W (&sums)[3]) {
  for (W& sum : sums) {
    for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  }
  if constexpr (LANES > 32) {
    __shared__ W warps[3][LANES / 32];
    for (int k = 0; k < 3; ++k) {
      if (threadIdx.x % 32 == 0) warps[k][threadIdx.x / 32] = sums[k];
      sums[k] = 0;
    }
    __syncthreads();
    for (int k = 0; k < 3; ++k) {
      for (const W sum : warps[k]) sums[k] += sum;
    }
  }
}

template <int LANES>
__device__ __forceinline__ std::int64_t row_of_this_thread() {
  return (static_cast<std::int64_t>(blockIdx.x) * BLOCK + threadIdx.x) / LANES;
}

// T: the rows' type. W: float, or double for double rows. If LANES is BLOCK, every block handles one row.
template <class T, class W, int WIDTH, int LANES>
__global__ void __launch_bounds__(BLOCK) forward(const CosineArgs args) {
  const std::int64_t row = row_of_this_thread<LANES>();
  if (row >= args.rows) return;
  const int lane = threadIdx.x % LANES;
  const T* a = static_cast<const T*>(args.a) + row * args.stride_a;
  const T* b = static_cast<const T*>(args.b) + row * args.stride_b;
  W sums[3] = {0, 0, 0};  // of a b, a a, b b
  for (std::int64_t k = lane * WIDTH; k < args.columns; k += LANES * WIDTH) {
    const auto pack_a = read<T, WIDTH>(a, k), pack_b = read<T, WIDTH>(b, k);
    for (int i = 0; i < WIDTH; ++i) {
      const W x = widen(pack_a.at[i]), y = widen(pack_b.at[i]);
      sums[0] += x * y;
      sums[1] += x * x;
      sums[2] += y * y;
    }
  }
  sum_over_row<LANES>(sums);
  if (lane) return;
  const W norm_a = sqrt(sums[1]), norm_b = sqrt(sums[2]);
  const W eps = static_cast<W>(args.eps);
  const bool is_zero = norm_a <= eps || norm_b <= eps;  // false for NaN, which must reach the result
  const W inverse_a = is_zero ? W(0) : W(1) / norm_a, inverse_b = is_zero ? W(0) : W(1) / norm_b;
  static_cast<W*>(args.c)[row] = is_zero ? W(0) : sums[0] * inverse_a * inverse_b;
  static_cast<W*>(args.inverse_a)[row] = inverse_a;
  static_cast<W*>(args.inverse_b)[row] = inverse_b;
}

// dc/da = b / (|a| |b|) - c a / |a|^2, and dc/db with a and b exchanged.
template <class T, class W, int WIDTH, int LANES>
__global__ void __launch_bounds__(BLOCK) backward(const CosineGradArgs args) {
  const std::int64_t row = row_of_this_thread<LANES>();
  if (row >= args.rows) return;
  const int lane = threadIdx.x % LANES;
  const T* a = static_cast<const T*>(args.a) + row * args.stride_a;
  const T* b = static_cast<const T*>(args.b) + row * args.stride_b;
  T* grad_a = args.grad_a ? static_cast<T*>(args.grad_a) + row * args.columns : nullptr;
  T* grad_b = args.grad_b ? static_cast<T*>(args.grad_b) + row * args.columns : nullptr;
  const W inverse_a = static_cast<const W*>(args.inverse_a)[row];
  const W inverse_b = static_cast<const W*>(args.inverse_b)[row];
  const W grad = static_cast<const W*>(args.grad)[row], along = grad * static_cast<const W*>(args.c)[row];
  const W across = grad * inverse_a * inverse_b;
  const W own_a = along * inverse_a * inverse_a, own_b = along * inverse_b * inverse_b;
  const bool is_zero = inverse_a == W(0) && inverse_b == W(0);  // then write 0: factors of 0 would turn inf into NaN
  for (std::int64_t k = lane * WIDTH; k < args.columns; k += LANES * WIDTH) {
    const auto pack_a = read<T, WIDTH>(a, k), pack_b = read<T, WIDTH>(b, k);
    Pack<T, WIDTH> by_a, by_b;
    for (int i = 0; i < WIDTH; ++i) {
      const W x = is_zero ? W(0) : widen(pack_a.at[i]), y = is_zero ? W(0) : widen(pack_b.at[i]);
      narrow(across * y - own_a * x, by_a.at[i]);
      narrow(across * x - own_b * y, by_b.at[i]);
    }
    if (grad_a) write(grad_a, k, by_a);
    if (grad_b) write(grad_b, k, by_b);
  }
}

bool is_multiple_of_16(std::uintptr_t bytes) { return bytes % 16 == 0; }

// Whether every row can be read, and its gradient written, 16 bytes at a time.
template <class T, class Args>
bool aligned(const Args& args) {
  return is_multiple_of_16(reinterpret_cast<std::uintptr_t>(args.a)) &&
         is_multiple_of_16(reinterpret_cast<std::uintptr_t>(args.b)) && is_multiple_of_16(args.stride_a * sizeof(T)) &&
         is_multiple_of_16(args.stride_b * sizeof(T)) && is_multiple_of_16(args.columns * sizeof(T));
}

unsigned blocks(std::int64_t rows, int lanes) {
  const std::int64_t count = (rows + BLOCK / lanes - 1) / (BLOCK / lanes);
  if (count > INT32_MAX) throw std::invalid_argument("too many rows for one launch: " + std::to_string(rows));
  return static_cast<unsigned>(count);
}

template <class T, class W>
void launch(const CosineArgs& args, cudaStream_t stream) {
  constexpr int WIDE = 16 / sizeof(T);
  if (!aligned<T>(args)) {
    forward<T, W, 1, 32><<<blocks(args.rows, 32), BLOCK, 0, stream>>>(args);
  } else if (args.rows <= FEW_ROWS) {
    forward<T, W, WIDE, BLOCK><<<blocks(args.rows, BLOCK), BLOCK, 0, stream>>>(args);
  } else {
    forward<T, W, WIDE, 32><<<blocks(args.rows, 32), BLOCK, 0, stream>>>(args);
  }
}

template <class T, class W>
void launch(const CosineGradArgs& args, cudaStream_t stream) {
  constexpr int WIDE = 16 / sizeof(T);
  if (!aligned<T>(args)) {
    backward<T, W, 1, 32><<<blocks(args.rows, 32), BLOCK, 0, stream>>>(args);
  } else if (args.rows <= FEW_ROWS) {
    backward<T, W, WIDE, BLOCK><<<blocks(args.rows, BLOCK), BLOCK, 0, stream>>>(args);
  } else {
    backward<T, W, WIDE, 32><<<blocks(args.rows, 32), BLOCK, 0, stream>>>(args);
  }
}

template <class Args>
void launch_for_type(const Args& args, void* stream_handle, const char* what) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (!args.rows) return;
  switch (args.type) {
    case Float::f16: launch<__half, float>(args, stream); break;
    case Float::bf16: launch<__nv_bfloat16, float>(args, stream); break;
    case Float::f32: launch<float, float>(args, stream); break;
    case Float::f64: launch<double, double>(args, stream); break;
  }
  check_cuda(cudaGetLastError(), what);
}

}  // namespace

void cosine_cuda(const CosineArgs& args, void* stream) { launch_for_type(args, stream, "pairwise cosine"); }

void cosine_grad_cuda(const CosineGradArgs& args, void* stream) {
  launch_for_type(args, stream, "the gradient of pairwise cosine");
}

const char* cosine_cuda_unusable() { return unusable(forward<float, float, 4, 32>); }

}  // namespace raoe
