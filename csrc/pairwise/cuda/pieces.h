// The pieces of the CUDA driver that are compiled apart, so that two compilers can work at once.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "../pairwise.h"

namespace raoe {

// block.cu: everything in one launch of one thread block, no workspace. Doubles need twice the registers.
constexpr std::int64_t ONE_BLOCK_PAIRS = 4096;
inline std::int64_t one_block_pairs(Float type) { return type == Float::f64 ? ONE_BLOCK_PAIRS / 2 : ONE_BLOCK_PAIRS; }
void pairwise_one_block(const PairwiseArgs& args, cudaStream_t stream);

// sort.cu: a stable sort of keys (64-bit where wide, else 32-bit) with their values. Each has two buffers
// of n; the sorted ones end up in [0].
struct SortBuffers {
  void* keys[2];
  std::uint32_t* values[2];
  bool wide;
};
std::size_t sort_temporary_bytes(std::uint32_t n, bool wide);
void sort_by_key(SortBuffers& buffers, std::uint32_t n, void* temporary, std::size_t bytes, cudaStream_t stream);

}  // namespace raoe
