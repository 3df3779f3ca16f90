// The kernels of the pairwise losses for launches of many blocks.
#pragma once

#include <cooperative_groups.h>

#include "pieces.h"
#include "solve.h"

namespace raoe {

constexpr int BLOCK = 128, LOADS = 32;
constexpr unsigned PREPARING_BLOCKS = 1024;
template <class T>
constexpr int ITEMS = sizeof(T) == 8 ? LOADS / 2 : LOADS;  // pairs per thread: as many as fit into 255 registers

template <class T>
struct Work {
  PairwiseArgs args;
  Arrays<T, std::uint32_t> at;
  Crossing<T> crossing;
  SortBuffers sort;
  T* converted;         // (n) similarity converted to T, if it has another type
  Extent<T>* extents;   // (preparing) for each block of `prepare`: the extent of the inputs that it has read
  unsigned preparing;
  float room;
};

struct AllBlocks {
  static constexpr bool one = false;
  static __device__ unsigned index() { return blockIdx.x; }
  static __device__ unsigned count() { return gridDim.x; }
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

// Write the keys and payloads to sort, and return the extent of the inputs.
template <class Bits, class T>
__device__ Extent<T> write_keys(const Work<T>& work) {
  Extent<T> extent;
  Bits* const keys = static_cast<Bits*>(work.sort.keys[0]);
#pragma unroll 1
  for (std::uint32_t i = blockIdx.x * BLOCK + threadIdx.x; i < work.crossing.n; i += work.preparing * BLOCK) {
    const T similarity = read_pair(work.args, i, keys[i], work.sort.values[0][i], extent);
    if (work.converted) work.converted[i] = similarity;
  }
  return extent;
}

template <class T>
__global__ void __launch_bounds__(BLOCK) prepare(const Work<T> work) {
  __shared__ __align__(16) unsigned char scratch[(BLOCK / 32 + 1) * sizeof(Extent<T>)];
  if (blockIdx.x == 0 && threadIdx.x == 0) *work.crossing.arrived = 0;
  const Extent<T> extent = work.sort.wide ? write_keys<std::uint64_t>(work) : write_keys<std::uint32_t>(work);
  const Extent<T> all = block_sum<BLOCK>(extent, reinterpret_cast<Extent<T>*>(scratch));
  if (threadIdx.x == 0) work.extents[blockIdx.x] = all;
}

template <class T>
using BlocksTiles = Tiles<T, BLOCK, ITEMS<T>, std::uint32_t, AllBlocks>;

template <class T>
__global__ void __launch_bounds__(BLOCK, 2) all_blocks(const Work<T> work) {
  extern __shared__ __align__(16) unsigned char memory[];
  BlocksTiles<T> tiles{work.args, work.at, &work.crossing, memory, {}};
  typename BlocksTiles<T>::Pairs my;
  Extent<T> extent;
  for (unsigned b = threadIdx.x; b < work.preparing; b += BLOCK) extent = extent + work.extents[b];
  tiles.extent = block_sum<BLOCK>(extent, tiles.template shared<Extent<T>>());
  solve(tiles, my, tiles.count() <= gridDim.x, work.room);
}

}  // namespace raoe
