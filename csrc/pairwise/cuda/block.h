// The pairwise losses in one launch of one thread block: first a sort, then solve.h, all in shared memory.
#pragma once

#include <cub/block/block_radix_sort.cuh>

#include "../../cuda_check.h"
#include "pieces.h"
#include "solve.h"

namespace raoe {

template <class T, int Block>
struct Shared {
  static constexpr int items = 4, slots = Block * items;
  using Index = std::uint16_t;
  using Work = Tiles<T, Block, items, Index, OneBlock>;
  template <class Bits>
  struct Sort {
    using Cub = cub::BlockRadixSort<Bits, Block, items, std::uint32_t>;
    union {
      typename Cub::TempStorage memory;
      Bits first[Block + 1];
    };
  };
  // The members of the union below share memory: the tables overwrite the memory of the sort, which has finished.
  struct Tables {
    alignas(16) T before[slots + 4], after[slots + 4];
    alignas(16) Index ends[2 * slots + ENDS_AHEAD / sizeof(Index)];
    std::uint64_t label[slots];
    T term[slots], below[slots], above[slots];
    Index rank[slots], run[slots], order[2][slots];
  };
  union {
    Sort<std::uint32_t> narrow;
    Sort<std::uint64_t> wide;
    Tables tables;
  };
  alignas(16) unsigned char scratch[Work::scratch_bytes];
};

// Sort the pairs into the threads' tiles, and return the extent of the inputs.
template <class Bits, class T, int Block>
__device__ Extent<T> sort_pairs(typename Shared<T, Block>::template Sort<Bits>& shared,
                                const typename Shared<T, Block>::Work& work,
                                typename Shared<T, Block>::Work::Pairs& my) {
  constexpr int items = Shared<T, Block>::items;
  Bits key[items];
  Extent<T> extent;
#pragma unroll
  for (int k = 0; k < items; ++k) {
    key[k] = ~Bits(0);  // padding comes last, even behind pairs with this key: the sort is stable
    my.pair[k] = 0;
    if (k < my.valid) read_pair(work.args, my.base + k, key[k], my.pair[k], extent);
  }
  using Cub = typename Shared<T, Block>::template Sort<Bits>::Cub;
  Cub(shared.memory).Sort(key, my.pair);
  __syncthreads();
  shared.first[threadIdx.x] = key[0];
  __syncthreads();
  const Bits behind = threadIdx.x + 1 < Block ? shared.first[threadIdx.x + 1] : Bits(0);
  __syncthreads();
  shared.first[threadIdx.x] = key[items - 1];
  __syncthreads();
  my.find_heads(key, threadIdx.x ? shared.first[threadIdx.x - 1] : Bits(0), behind, work.n());
  __syncthreads();
  return block_sum<Block>(extent, work.template shared<Extent<T>>());
}

template <class T, int Block>
__global__ void __launch_bounds__(Block) one_block(const PairwiseArgs args, float room) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared<T, Block>*>(memory);
  auto& at = shared.tables;
  typename Shared<T, Block>::Work work{
      args,
      {at.before, at.after, at.ends + ENDS_AHEAD / sizeof(*at.ends), at.rank, at.run, at.label, at.term, at.below, at.above,
       {at.order[0], at.order[1]}},
      nullptr, shared.scratch, {}};
  typename Shared<T, Block>::Work::Pairs my;
  work.place(my, 0);
  work.extent = args.score_type == Key::f32 ? sort_pairs<std::uint32_t, T, Block>(shared.narrow, work, my)
                                            : sort_pairs<std::uint64_t, T, Block>(shared.wide, work, my);
#pragma unroll
  for (int k = 0; k < Shared<T, Block>::items; ++k) {
    my.c[k] = load<T>(args.similarity, args.similarity_type, index_of(my.pair[k]));  // padding loads index 0
  }
  solve(work, my, true, room);
}

template <class T, int Block>
bool launch_one_block(const PairwiseArgs& args, cudaStream_t stream) {
  constexpr int bytes = sizeof(Shared<T, Block>);
  static_assert(Block > 256 || bytes <= 64 * 1024, "1,024 pairs must fit one block on every GPU: see native.py");
  if (args.n > Block * Shared<T, Block>::items || bytes > shared_memory()) return false;
  if (args.losses == nullptr) return true;
  if (bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(one_block<T, Block>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "shared memory for the pairwise losses");
  }
  one_block<T, Block><<<1, Block, bytes, stream>>>(args, static_cast<float>(linear_room(true, args.n)));
  check_cuda(cudaGetLastError(), "the pairwise losses in one block");
  return true;
}

}  // namespace raoe
