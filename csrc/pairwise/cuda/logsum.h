// Sums of exponentials across a thread block: what the CUDA drivers of the pairwise losses scan and reduce.
//
// Every tree has a fixed shape, so equal inputs give equal bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../formulas.h"

namespace raoe {

// The number sum * exp(max), whose logarithm stays in range where the number does not. No terms: {-inf, 0}.
template <class T>
struct LogSum {
  T max, sum;
};

template <class T>
RAOE_HD LogSum<T> no_terms() {
  return {T(-INFINITY), T(0)};
}

// exp(x) as such a sum; x = -inf adds nothing.
template <class T>
RAOE_HD LogSum<T> term(T x) {
  return {x, T(1)};
}

template <class T>
RAOE_HD LogSum<T> plus(LogSum<T> a, LogSum<T> b) {
  using std::exp;
  if (a.max < b.max) {
    const LogSum<T> larger = b;
    b = a;
    a = larger;
  }
  if (b.max == T(-INFINITY)) return a.max == T(-INFINITY) ? no_terms<T>() : a;  // -inf - -inf would be NaN
  return {a.max, a.sum + b.sum * exp(b.max - a.max)};
}

template <class T>
RAOE_HD T log_of(LogSum<T> a) {
  using std::log;
  return a.max + log(a.sum);  // -inf + -inf = -inf for no terms
}

#if defined(__CUDACC__)

// ---- Inputs. ----

template <class T>
__device__ __forceinline__ T load(const void* data, Float type, std::int64_t i) {
  switch (type) {
    case Float::f16: return T(__half2float(static_cast<const __half*>(data)[i]));
    case Float::bf16: return T(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]));
    case Float::f32: return T(static_cast<const float*>(data)[i]);
    default: return T(static_cast<const double*>(data)[i]);
  }
}

// The score as an unsigned integer of the same order; reports a NaN, wherever it then goes.
template <class Bits>
__device__ __forceinline__ Bits load_key(const void* data, Key type, std::int64_t i, bool& nan) {
  if (type == Key::f32) {
    const float score = static_cast<const float*>(data)[i];
    nan |= is_nan(score);
    return orderable(score);
  }
  if (type == Key::f64) {
    const double score = static_cast<const double*>(data)[i];
    nan |= is_nan(score);
    return static_cast<Bits>(orderable(score));
  }
  return static_cast<Bits>(orderable(static_cast<const std::int64_t*>(data)[i]));
}

// ---- Across a warp and a block. `shared` holds one value a warp and one more; all threads of the block call. ----

template <class V>
__device__ __forceinline__ V from_lane_xor(V value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
__device__ __forceinline__ LogSum<T> from_lane_xor(LogSum<T> value, int mask) {
  return {__shfl_xor_sync(0xffffffffu, value.max, mask), __shfl_xor_sync(0xffffffffu, value.sum, mask)};
}

// The value of the lane `distance` places earlier in the direction of the scan.
template <bool Reverse, class T>
__device__ __forceinline__ LogSum<T> from_earlier(LogSum<T> value, int distance) {
  if (Reverse) {
    return {__shfl_down_sync(0xffffffffu, value.max, distance), __shfl_down_sync(0xffffffffu, value.sum, distance)};
  }
  return {__shfl_up_sync(0xffffffffu, value.max, distance), __shfl_up_sync(0xffffffffu, value.sum, distance)};
}

template <int Block, class V, class Op>
__device__ V block_reduce(V value, V nothing, V* shared, Op op) {
  constexpr int warps = Block / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int mask = 16; mask; mask >>= 1) value = op(value, from_lane_xor(value, mask));
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  if (warp == 0) {
    value = lane < warps ? shared[lane] : nothing;
    for (int mask = 16; mask; mask >>= 1) value = op(value, from_lane_xor(value, mask));
    if (lane == 0) shared[warps] = value;
  }
  __syncthreads();
  value = shared[warps];
  __syncthreads();
  return value;
}

template <int Block, class T>
__device__ LogSum<T> block_sum(LogSum<T> value, LogSum<T>* shared) {
  return block_reduce<Block>(value, no_terms<T>(), shared, [](LogSum<T> a, LogSum<T> b) { return plus(a, b); });
}

// A NaN may get lost: callers look for those themselves.
template <int Block, class T>
__device__ T block_max(T value, T* shared) {
  return block_reduce<Block>(value, T(-INFINITY), shared, [](T a, T b) { return a < b ? b : a; });
}

template <int Block>
__device__ std::int64_t block_min(std::int64_t value, std::int64_t* shared) {
  return block_reduce<Block>(value, std::int64_t(INT64_MAX), shared,
                             [](std::int64_t a, std::int64_t b) { return a < b ? a : b; });
}

template <bool Reverse, class T>
__device__ LogSum<T> warp_inclusive(LogSum<T> value, int lane) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const LogSum<T> earlier = from_earlier<Reverse>(value, distance);
    if (Reverse ? lane + distance < 32 : lane >= distance) value = plus(earlier, value);
  }
  return value;
}

// The sum over the threads before this one (Reverse: behind it), and the sum over all of them.
template <bool Reverse, int Block, class T>
__device__ LogSum<T> block_exclusive(LogSum<T> value, LogSum<T>* shared, LogSum<T>& total) {
  constexpr int warps = Block / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const bool leads = lane == (Reverse ? 31 : 0), closes = lane == (Reverse ? 0 : 31);
  value = warp_inclusive<Reverse>(value, lane);
  LogSum<T> before = from_earlier<Reverse>(value, 1);
  if (leads) before = no_terms<T>();
  if (closes) shared[warp] = value;
  __syncthreads();
  if (warp == 0) {
    const LogSum<T> all = warp_inclusive<Reverse>(lane < warps ? shared[lane] : no_terms<T>(), lane);
    LogSum<T> earlier = from_earlier<Reverse>(all, 1);
    if (leads) earlier = no_terms<T>();
    if (lane == (Reverse ? 0 : warps - 1)) shared[warps] = all;
    if (lane < warps) shared[lane] = earlier;
  }
  __syncthreads();
  total = shared[warps];
  before = plus(shared[warp], before);
  __syncthreads();
  return before;
}

// x holds Items consecutive positions of the tile for each thread. table[i] becomes log(before + the terms of the tile
// before position i) (Reverse: behind it). Returns before + all terms of the tile, the same in every thread.
template <bool Reverse, int Block, int Items, class T>
__device__ LogSum<T> tile_scan(const T (&x)[Items], LogSum<T> before, T* table, LogSum<T>* shared) {
  LogSum<T> own = no_terms<T>(), total;
#pragma unroll
  for (int k = 0; k < Items; ++k) own = plus(own, term(x[Reverse ? Items - 1 - k : k]));
  LogSum<T> running = plus(before, block_exclusive<Reverse, Block>(own, shared, total));
#pragma unroll
  for (int k = 0; k < Items; ++k) {
    const int at = Reverse ? Items - 1 - k : k;
    table[threadIdx.x * Items + at] = log_of(running);
    running = plus(running, term(x[at]));
  }
  __syncthreads();
  return plus(before, total);
}

template <int Block, int Items, class T>
__device__ LogSum<T> tile_sum(const T (&x)[Items], LogSum<T>* shared) {
  LogSum<T> own = no_terms<T>();
#pragma unroll
  for (int k = 0; k < Items; ++k) own = plus(own, term(x[k]));
  return block_sum<Block>(own, shared);
}

// The smallest of the thread block's labels that is larger than `after` (or any, at the first call). False: none is.
template <int Block, int Items>
__device__ bool next_label(const std::int64_t (&labels)[Items], int valid, bool first, std::int64_t after,
                           std::int64_t* shared, std::int64_t& next) {
  bool found = false;
  std::int64_t least = INT64_MAX;
#pragma unroll
  for (int k = 0; k < Items; ++k) {
    if (k < valid && (first || labels[k] > after)) {
      found = true;
      if (labels[k] < least) least = labels[k];
    }
  }
  next = block_min<Block>(least, shared);
  return __syncthreads_or(found);
}

#endif  // __CUDACC__

}  // namespace raoe
