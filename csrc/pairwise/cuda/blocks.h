// The kernels of the pairwise losses by many blocks.
#pragma once

#include <cooperative_groups.h>

#include "pieces.h"
#include "solve.h"

namespace raoe {

constexpr int BLOCK = 256, LOADS = 16;
constexpr unsigned PREPARING_BLOCKS = 1024;
template <class T>
constexpr int ITEMS = sizeof(T) == 8 ? LOADS / 2 : LOADS;  // a thread's: what 128 registers hold

template <class T>
struct Work {
  PairwiseArgs args;
  Arrays<T, std::uint32_t> at;
  Crossing<T> crossing;
  SortBuffers sort;
  T* converted;         // (n) similarity where it is not T's type
  Extent<T>* extents;   // (preparing) of what each block of `prepare` has read
  unsigned preparing;
  T room;
};

struct AllBlocks {
  static constexpr bool one = false;
  static __device__ unsigned index() { return blockIdx.x; }
  static __device__ unsigned count() { return gridDim.x; }
  static __device__ bool resident(std::uint32_t tiles) { return tiles <= gridDim.x; }
  static __device__ void sync() { cooperative_groups::this_grid().sync(); }
};

// Keys and payloads to sort, and what the inputs are like.
template <class Bits, class T>
__device__ Extent<T> write_keys(const Work<T>& work) {
  Extent<T> extent;
  Bits* const keys = static_cast<Bits*>(work.sort.keys[0]);
  std::uint32_t* const pairs = work.sort.values[0];
#pragma unroll 4
  for (std::uint32_t i = blockIdx.x * BLOCK + threadIdx.x; i < work.crossing.n; i += work.preparing * BLOCK) {
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
  // The last tile's rest: read, and not used.
  for (std::uint32_t p = work.crossing.n + threadIdx.x; !blockIdx.x && p < work.crossing.tiles * BLOCK * ITEMS<T>; p += BLOCK) {
    work.sort.values[0][p] = work.sort.values[1][p] = 0;
  }
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
