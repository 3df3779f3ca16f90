// Pairwise cosine on the GPU: one warp a row, each row read once in either direction.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../cuda_check.h"
#include "cosine.h"

namespace raoe {
namespace {

constexpr int BLOCK = 256;

__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

__device__ __forceinline__ void narrow(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
__device__ __forceinline__ void narrow(float x, float& y) { y = x; }
__device__ __forceinline__ void narrow(double x, double& y) { y = x; }

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int mask = 16; mask; mask >>= 1) value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}

__device__ __forceinline__ std::int64_t row_of_this_warp() {
  return (static_cast<std::int64_t>(blockIdx.x) * BLOCK + threadIdx.x) / 32;
}

// T: the rows' type. W: float, or double for double rows.
template <class T, class W>
__global__ void __launch_bounds__(BLOCK) forward(const CosineArgs args) {
  const std::int64_t row = row_of_this_warp();
  if (row >= args.rows) return;
  const int lane = threadIdx.x & 31;
  const T* a = static_cast<const T*>(args.a) + row * args.stride_a;
  const T* b = static_cast<const T*>(args.b) + row * args.stride_b;
  W dot = 0, squares_a = 0, squares_b = 0;
  for (std::int64_t k = lane; k < args.columns; k += 32) {
    const W x = widen(a[k]), y = widen(b[k]);
    dot += x * y;
    squares_a += x * x;
    squares_b += y * y;
  }
  dot = warp_sum(dot);
  const W norm_a = sqrt(warp_sum(squares_a)), norm_b = sqrt(warp_sum(squares_b));
  if (lane) return;
  const W eps = static_cast<W>(args.eps);
  const bool dead = norm_a <= eps || norm_b <= eps;  // false for NaN, which goes on into the result
  const W inverse_a = dead ? W(0) : W(1) / norm_a, inverse_b = dead ? W(0) : W(1) / norm_b;
  static_cast<W*>(args.c)[row] = dead ? W(0) : dot * inverse_a * inverse_b;
  static_cast<W*>(args.inverse_a)[row] = inverse_a;
  static_cast<W*>(args.inverse_b)[row] = inverse_b;
}

// dc/da = b / (|a| |b|) - c a / |a|^2, and the same with a and b exchanged.
template <class T, class W>
__global__ void __launch_bounds__(BLOCK) backward(const CosineGradArgs args) {
  const std::int64_t row = row_of_this_warp();
  if (row >= args.rows) return;
  const int lane = threadIdx.x & 31;
  const T* a = static_cast<const T*>(args.a) + row * args.stride_a;
  const T* b = static_cast<const T*>(args.b) + row * args.stride_b;
  T* grad_a = args.grad_a ? static_cast<T*>(args.grad_a) + row * args.columns : nullptr;
  T* grad_b = args.grad_b ? static_cast<T*>(args.grad_b) + row * args.columns : nullptr;
  const W inverse_a = static_cast<const W*>(args.inverse_a)[row];
  const W inverse_b = static_cast<const W*>(args.inverse_b)[row];
  const W grad = static_cast<const W*>(args.grad)[row], along = grad * static_cast<const W*>(args.c)[row];
  const W across = grad * inverse_a * inverse_b;
  const W own_a = along * inverse_a * inverse_a, own_b = along * inverse_b * inverse_b;
  const bool dead = inverse_a == W(0) && inverse_b == W(0);  // then 0 even where a row holds what 0 cannot multiply
  for (std::int64_t k = lane; k < args.columns; k += 32) {
    const W x = dead ? W(0) : widen(a[k]), y = dead ? W(0) : widen(b[k]);
    if (grad_a) narrow(across * y - own_a * x, grad_a[k]);
    if (grad_b) narrow(across * x - own_b * y, grad_b[k]);
  }
}

unsigned blocks(std::int64_t rows) {
  const std::int64_t count = (rows + BLOCK / 32 - 1) / (BLOCK / 32);
  if (count > INT32_MAX) throw std::invalid_argument("too many rows for one launch: " + std::to_string(rows));
  return static_cast<unsigned>(count);
}

}  // namespace

void cosine_cuda(const CosineArgs& args, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const unsigned grid = blocks(args.rows);
  if (!grid) return;
  switch (args.type) {
    case Float::f16: forward<__half, float><<<grid, BLOCK, 0, stream>>>(args); break;
    case Float::bf16: forward<__nv_bfloat16, float><<<grid, BLOCK, 0, stream>>>(args); break;
    case Float::f32: forward<float, float><<<grid, BLOCK, 0, stream>>>(args); break;
    case Float::f64: forward<double, double><<<grid, BLOCK, 0, stream>>>(args); break;
  }
  check_cuda(cudaGetLastError(), "pairwise cosine");
}

void cosine_grad_cuda(const CosineGradArgs& args, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const unsigned grid = blocks(args.rows);
  if (!grid) return;
  switch (args.type) {
    case Float::f16: backward<__half, float><<<grid, BLOCK, 0, stream>>>(args); break;
    case Float::bf16: backward<__nv_bfloat16, float><<<grid, BLOCK, 0, stream>>>(args); break;
    case Float::f32: backward<float, float><<<grid, BLOCK, 0, stream>>>(args); break;
    case Float::f64: backward<double, double><<<grid, BLOCK, 0, stream>>>(args); break;
  }
  check_cuda(cudaGetLastError(), "the gradient of pairwise cosine");
}

}  // namespace raoe
