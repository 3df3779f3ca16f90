// The pieces of the CUDA driver that are compiled apart, so that several compilers can work at once.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "../../cuda_check.h"
#include "../pairwise.h"

namespace raoe {

constexpr std::int64_t MOST_PAIRS = std::int64_t(1) << 28;  // as on the CPU: an index of 28 bits, and labels above it
constexpr std::int64_t ONE_BLOCK_PAIRS = 4096;

// The current device's, as what it is rarely changes.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "the current device");
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "an attribute of the device");
  return value;
}
inline int shared_memory() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// block_*.cu: everything in one launch of one thread block, without a workspace. False: more pairs than this GPU's
// shared memory has room for. losses = null only asks.
bool one_block_f32(const PairwiseArgs& args, cudaStream_t stream);
bool one_block_f64(const PairwiseArgs& args, cudaStream_t stream);

// blocks.cu: any number of pairs. workspace = null only asks for its size.
std::size_t many_blocks(const PairwiseArgs& args, unsigned char* workspace, cudaStream_t stream);

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
