// The kernels of the pairwise losses with many blocks.
#pragma once

#include <cooperative_groups.h>

#include "pieces.h"
#include "solve.h"

namespace raoe {

constexpr int BLOCK = 128, LOADS = 32;
constexpr unsigned PREPARING_BLOCKS = 1024;
template <class T>
constexpr int ITEMS = sizeof(T) == 8 ? LOADS / 2 : LOADS;  // pairs per thread, as many as 255 registers hold

template <class T>
struct Work {
  PairwiseArgs args;
  Arrays<T, std::uint32_t> at;
  Crossing<T> crossing;
  SortBuffers sort;
  T* converted;         // (n) similarity converted to T, if it has another type
  Extent<T>* extents;   // (preparing) extent of the inputs that each block of `prepare` has read
  unsigned preparing;
  T room;
};

struct AllBlocks {
  static constexpr bool one = false;
  static __device__ unsigned index() { return blockIdx.x; }
  static __device__ unsigned count() { return gridDim.x; }
  static __device__ bool resident(std::uint32_t tiles) { return tiles <= gridDim.x; }
  // The grid barrier of cooperative groups, without the code for clusters and grids of several dimensions: the
  // counter's highest bit flips when the last block arrives.
  static __device__ __forceinline__ void sync([[maybe_unused]] unsigned* arrived) {
#if defined(__CUDA_ARCH__)
    __syncthreads();
    if (threadIdx.x == 0) {
      constexpr unsigned all = 1u << 31;
      __threadfence();
      const unsigned before = atomicAdd(arrived, blockIdx.x ? 1 : all - (gridDim.x - 1));
      while (((before ^ *static_cast<volatile unsigned*>(arrived)) & all) == 0) {
      }
      __threadfence();
    }
    __syncthreads();
#else
    cooperative_groups::this_grid().sync();  // provided by the emulator in the tests
#endif
  }
};

// Write keys and payloads of four pairs at a time if scores and similarity are float32 and all inputs 16-byte aligned.
// Returns the number of pairs. Labels are compared by their low words, and again if a label does not fit 32 bits.
template <class T>
__device__ std::uint32_t write_fours(const Work<T>& work, Extent<T>& extent) {
  using Floats = Neighbours<float, 4>;
  using Words = Neighbours<std::uint32_t, 4>;
  const auto address = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); };
  const PairwiseArgs& args = work.args;
  if (args.score_type != Key::f32 || args.similarity_type != Float::f32) return 0;
  if ((address(args.scores) | address(args.similarity) | address(args.labels)) % 16) return 0;
  const std::uint32_t fours = work.crossing.n / 4, stride = work.preparing * BLOCK;
  std::int32_t low = INT32_MAX, high = INT32_MIN, beyond = 0;
  bool nan = false;
#pragma unroll 1
  for (std::uint32_t q = blockIdx.x * BLOCK + threadIdx.x; q < fours; q += stride) {
    const Floats scores = static_cast<const Floats*>(args.scores)[q];
    const Floats similarities = static_cast<const Floats*>(args.similarity)[q];
    Neighbours<std::int64_t, 4> labels{};
    if (args.labels) labels = reinterpret_cast<const Neighbours<std::int64_t, 4>*>(args.labels)[q];
    Words keys, pairs;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float score = scores.at[k], similarity = similarities.at[k];
      const auto label = static_cast<std::int32_t>(labels.at[k]);
      nan |= is_nan(score) || is_nan(similarity);
      extent.low = fminf(extent.low, similarity), extent.high = fmaxf(extent.high, similarity);
      low = label < low ? label : low, high = label > high ? label : high;
      beyond |= static_cast<std::int32_t>(labels.at[k] >> 32) ^ (label >> 31);
      keys.at[k] = orderable(score);
      pairs.at[k] = (static_cast<std::uint32_t>(label) << LABEL_SHIFT) + (4 * q + k);
    }
    static_cast<Words*>(work.sort.keys[0])[q] = keys;
    reinterpret_cast<Words*>(work.sort.values[0])[q] = pairs;
  }
  extent.nan = nan;
  if (args.labels && low <= high) {
    extent.label_low = low, extent.label_high = high;
    for (std::uint32_t q = blockIdx.x * BLOCK + threadIdx.x; beyond && q < fours; q += stride) {
      for (std::uint32_t i = 4 * q; i < 4 * q + 4; ++i) {
        const std::int64_t label = args.labels[i];
        if (q == blockIdx.x * BLOCK + threadIdx.x && i == 4 * q) extent.label_low = extent.label_high = label;
        extent.label_low = label < extent.label_low ? label : extent.label_low;
        extent.label_high = label > extent.label_high ? label : extent.label_high;
      }
    }
  }
  return 4 * fours;
}

// Write the keys and payloads to sort, and return the extent of the inputs.
template <class Bits, class T>
__device__ Extent<T> write_keys(const Work<T>& work) {
  Extent<T> extent;
  Bits* const keys = static_cast<Bits*>(work.sort.keys[0]);
  std::uint32_t* const pairs = work.sort.values[0];
  std::uint32_t first = 0;
  if constexpr (sizeof(Bits) == 4 && sizeof(T) == 4) first = write_fours(work, extent);
#pragma unroll 1
  for (std::uint32_t i = first + blockIdx.x * BLOCK + threadIdx.x; i < work.crossing.n; i += work.preparing * BLOCK) {
    Bits key;
    std::uint32_t pair;
    const T similarity = read_pair(work.args, i, key, pair, extent);
    keys[i] = key, pairs[i] = pair;
    if (work.converted) work.converted[i] = similarity;
  }
  return extent;
}

template <class T>
__global__ void __launch_bounds__(BLOCK) prepare(const Work<T> work) {
  __shared__ __align__(16) unsigned char scratch[(BLOCK / 32 + 1) * sizeof(Extent<T>)];
  // Clear the rest of the last tile, which is read but not used.
  for (std::uint32_t p = work.crossing.n + threadIdx.x; !blockIdx.x && p < work.crossing.tiles * BLOCK * ITEMS<T>; p += BLOCK) {
    work.sort.values[0][p] = work.sort.values[1][p] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *work.crossing.arrived = 0;
  const Extent<T> extent = work.sort.wide ? write_keys<std::uint64_t>(work) : write_keys<std::uint32_t>(work);
  const Extent<T> all = block_sum<BLOCK>(extent, reinterpret_cast<Extent<T>*>(scratch));
  if (threadIdx.x == 0) work.extents[blockIdx.x] = all;
}

template <class T, class Blocks = AllBlocks>
using BlocksSolver = Solver<T, BLOCK, ITEMS<T>, std::uint32_t, Blocks>;
template <class T>
constexpr std::size_t SCRATCH_BYTES = BlocksSolver<T>::scratch_bytes;

template <class T>
__global__ void __launch_bounds__(BLOCK, 2) all_blocks(const Work<T> work) {
  extern __shared__ __align__(16) unsigned char memory[];
  BlocksSolver<T> solver{work.args, work.at, &work.crossing, memory, work.room};
  typename BlocksSolver<T>::Pairs my;
  Extent<T> extent;
  for (unsigned b = threadIdx.x; b < work.preparing; b += BLOCK) extent = extent + work.extents[b];
  solver.run(block_sum<BLOCK>(extent, reinterpret_cast<Extent<T>*>(memory)), my);
}

}  // namespace raoe
