// Scans and reductions of a thread block, with fixed summation trees. `shared` holds one V per warp and one more. All
// threads of the block must call these functions.
#pragma once

#include "sums.h"

namespace raoe {

template <class V, class Move>
__device__ __forceinline__ V by_words(V value, Move move) {
  static_assert(sizeof(V) % 4 == 0, "whole words");
  std::uint32_t words[sizeof(V) / 4];
  memcpy(words, &value, sizeof(V));
#pragma unroll
  for (std::uint32_t& word : words) word = move(word);
  memcpy(&value, words, sizeof(V));
  return value;
}

// Return the value of the lane `distance` places earlier in the direction of the scan.
template <bool Reverse, class V>
__device__ __forceinline__ V from_earlier(V value, int distance) {
  return by_words(value, [&](std::uint32_t word) {
    return Reverse ? __shfl_down_sync(0xffffffffu, word, distance) : __shfl_up_sync(0xffffffffu, word, distance);
  });
}

template <bool Reverse, int Lanes, class V>
__device__ __forceinline__ V warp_inclusive(V value, int lane) {
#pragma unroll
  for (int distance = 1; distance < Lanes; distance *= 2) {
    const V earlier = from_earlier<Reverse>(value, distance);
    if (Reverse ? lane + distance < Lanes : lane >= distance) value = earlier + value;
  }
  return value;
}

// Mask of the lanes before this one (Reverse: after it).
template <bool Reverse>
__device__ __forceinline__ std::uint32_t earlier_lanes(int lane) {
  return Reverse ? ~1u << lane : (1u << lane) - 1;
}

// Return the sum of the spans before this thread in its warp, without counts, and store the whole warp's span in
// `shared`. The retained sums of the last run belong to one lane, so they are fetched from it and not scanned.
template <bool Reverse, bool Ranked, bool Columns, class S>
__device__ __forceinline__ S warp_exclusive(const S& own, int lane, S* shared) {
  S all = own, before;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const bool takes = Reverse ? lane + distance < 32 : lane >= distance;
    const auto add = [&](auto& sum) {
      const auto earlier = from_earlier<Reverse>(sum, distance);
      if (takes) sum = earlier + sum;
    };
    if (Ranked) add(all.rank);
    if (Columns) add(all.sum[0]), add(all.sum[1]);
  }
  const auto shift = [&](auto sum) {
    const auto earlier = from_earlier<Reverse>(sum, 1);
    return lane == (Reverse ? 31 : 0) ? decltype(sum){} : earlier;
  };
  if (Ranked) before.rank = shift(all.rank);
  if (Columns) before.sum[0] = shift(all.sum[0]), before.sum[1] = shift(all.sum[1]);
  const bool begins = own.edge != 0;
  const std::uint32_t found = __ballot_sync(0xffffffffu, begins) & earlier_lanes<Reverse>(lane);
  const int source = Reverse ? __ffs(found) - 1 : 31 - __clz(found);
  const auto fetch = [&](auto value) {
    const auto fetched = __shfl_sync(0xffffffffu, value, source & 31);
    return found ? fetched : decltype(value){};
  };
  before.edge = fetch(own.edge);
  all.edge = begins ? own.edge : before.edge;
  if (Columns) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const auto retained = before.sum[k] + own.retained[k];
      before.retained[k] = fetch(retained);
      all.retained[k] = begins ? retained : before.retained[k];
    }
  }
  if (lane == (Reverse ? 0 : 31)) shared[threadIdx.x >> 5] = all;
  return before;
}

// Replace each warp's sum in `shared` by the sum over the warps before it (Reverse: after it). Warp `by` does the work.
template <bool Reverse, int Warps, class S>
__device__ __forceinline__ void scan_warps(S* shared, int by) {
  const int lane = threadIdx.x & 31;
  if (static_cast<int>(threadIdx.x >> 5) != by) return;
  const S all = warp_inclusive<Reverse, Warps>(lane < Warps ? shared[lane] : S(), lane);
  S earlier = from_earlier<Reverse>(all, 1);
  if (lane == (Reverse ? Warps - 1 : 0)) earlier = S();
  if (lane < Warps) shared[lane] = earlier;
}

// Return the sum over the warps before this thread's warp (Reverse: after it).
template <bool Reverse, int Warps, class S>
__device__ __forceinline__ S earlier_warps(const S* shared) {
  const int warp = threadIdx.x >> 5;
  if constexpr (Warps > 4) {
    return shared[warp];  // scan_warps has already summed
  } else {
    S before;
#pragma unroll 1
    for (int other = Reverse ? Warps - 1 : 0; other != warp; other += Reverse ? -1 : 1) before = before + shared[other];
    return before;
  }
}

// Return the sum over the threads before this one (Reverse: after it); `total` is the sum over all threads.
template <bool Reverse, int Block, class V>
__device__ __forceinline__ V block_exclusive(V value, V* shared, V& total) {
  constexpr int warps = Block / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  value = warp_inclusive<Reverse, 32>(value, lane);
  V before = from_earlier<Reverse>(value, 1);
  if (lane == (Reverse ? 31 : 0)) before = V();
  if (lane == (Reverse ? 0 : 31)) shared[warp] = value;
  __syncthreads();
  if (warp == 0) {
    const V all = warp_inclusive<Reverse, warps>(lane < warps ? shared[lane] : V(), lane);
    V earlier = from_earlier<Reverse>(all, 1);
    if (lane == (Reverse ? warps - 1 : 0)) earlier = V();
    if (lane == (Reverse ? 0 : warps - 1)) shared[warps] = all;
    if (lane < warps) shared[lane] = earlier;
  }
  __syncthreads();
  total = shared[warps];
  before = shared[warp] + before;
  __syncthreads();
  return before;
}

// The same, not inlined, because its code is long if sums are logarithms.
template <bool Reverse, int Block, class V>
__device__ __noinline__ V block_exclusive_call(V value, V* shared, V& total) {
  return block_exclusive<Reverse, Block>(value, shared, total);
}

// Return the sum over the block to every thread.
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

// ---- Consecutive elements in memory, moved 16 bytes at a time. ----

template <class V, int Items>
struct alignas(sizeof(V) * Items < 16 ? sizeof(V) * Items : 16) Neighbours {
  V at[Items];
};

}  // namespace raoe
