// Scans and reductions of a thread block, which always add in the same order. `shared` has room for one V per warp and
// one more. All threads of the block must call these functions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace raoe {

// Return the value of the lane `distance` places earlier in the direction of the scan.
template <bool Reverse, class V>
__device__ __forceinline__ V from_earlier(V value, int distance) {
  static_assert(sizeof(V) % 4 == 0, "whole words");
  std::uint32_t words[sizeof(V) / 4];
  memcpy(words, &value, sizeof(V));
#pragma unroll
  for (std::uint32_t& word : words) {
    word = Reverse ? __shfl_down_sync(0xffffffffu, word, distance) : __shfl_up_sync(0xffffffffu, word, distance);
  }
  memcpy(&value, words, sizeof(V));
  return value;
}

// Replace `value` by the sum over the lanes before this one (Reverse: after it), and return the sum with this lane.
template <bool Reverse, int Lanes, class V>
__device__ __forceinline__ V warp_scan(V& value, int lane) {
  V all = value;
#pragma unroll
  for (int distance = 1; distance < Lanes; distance *= 2) {
    const V earlier = from_earlier<Reverse>(all, distance);
    if (Reverse ? lane + distance < Lanes : lane >= distance) all = earlier + all;
  }
  value = from_earlier<Reverse>(all, 1);
  if (lane == (Reverse ? Lanes - 1 : 0)) value = V();
  return all;
}

// Return the sum over the threads before this one (Reverse: after it); `total` is the sum over all threads.
template <bool Reverse, int Block, class V>
__device__ __forceinline__ V block_exclusive(V value, V* shared, V& total) {
  constexpr int warps = Block / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const V own = warp_scan<Reverse, 32>(value, lane);
  if (lane == (Reverse ? 0 : 31)) shared[warp] = own;
  __syncthreads();
  if (warp == 0) {
    V earlier = lane < warps ? shared[lane] : V();
    const V all = warp_scan<Reverse, warps>(earlier, lane);
    if (lane == (Reverse ? 0 : warps - 1)) shared[warps] = all;
    if (lane < warps) shared[lane] = earlier;
  }
  __syncthreads();
  total = shared[warps];
  value = shared[warp] + value;
  __syncthreads();
  return value;
}

// Return the sum over all threads of the block. Every thread gets the sum.
template <int Block, class V>
__device__ V block_sum(V value, V* shared) {
  constexpr int warps = Block / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int distance = 16; distance; distance /= 2) value = value + from_earlier<true>(value, distance);
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = shared[0];
  for (int other = 1; other < warps; ++other) value = value + shared[other];
  __syncthreads();
  return value;
}

}  // namespace raoe
