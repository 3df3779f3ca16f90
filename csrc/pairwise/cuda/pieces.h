// Functions of the CUDA files, which are compiled separately so that several compilers can run in parallel.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "../../cuda_check.h"
#include "../pairwise.h"

namespace raoe {

constexpr std::int64_t MOST_PAIRS = std::int64_t(1) << 28;  // as on the CPU, where an index has 28 bits
constexpr std::int64_t ONE_BLOCK_PAIRS = 4096;

// Return an attribute of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda(cudaGetDevice(&device), "the current device");
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "an attribute of the device");
  return value;
}
inline int shared_memory() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// block_*.cu: one launch of one thread block, without a workspace. Returns false if the pairs do not fit into
// this GPU's shared memory. With losses = null, it only returns whether they fit, and launches nothing.
bool one_block_f32(const PairwiseArgs& args, cudaStream_t stream);
bool one_block_f64(const PairwiseArgs& args, cudaStream_t stream);

// blocks.cu: any number of pairs. Returns the workspace's size in bytes. With workspace = null, it launches nothing.
std::size_t many_blocks(const PairwiseArgs& args, unsigned char* workspace, cudaStream_t stream);

// sort.cu: a stable sort of keys (64-bit if wide, else 32-bit) with their values. Keys and
// values have two buffers of n elements each. Afterwards, buffer [0] holds the sorted elements.
struct SortBuffers {
  void* keys[2];
  std::uint32_t* values[2];
  bool wide;
};
std::size_t sort_temporary_bytes(std::uint32_t n, bool wide);
void sort_by_key(SortBuffers& buffers, std::uint32_t n, void* temporary, std::size_t bytes, cudaStream_t stream);

}  // namespace raoe
