// CUB's device-wide radix sort for 32-bit and 64-bit keys.
#include <cub/device/device_radix_sort.cuh>

#include "../../cuda_check.h"
#include "pieces.h"

namespace raoe {
namespace {

template <class Bits>
std::size_t temporary_bytes(std::uint32_t n) {
  std::size_t bytes = 0;
  cub::DoubleBuffer<Bits> keys(nullptr, nullptr);
  cub::DoubleBuffer<std::uint32_t> values(nullptr, nullptr);
  check_cuda(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, values, n), "the sort's temporary storage");
  return bytes;
}

template <class Bits>
void sort(SortBuffers& buffers, std::uint32_t n, void* temporary, std::size_t bytes, cudaStream_t stream) {
  cub::DoubleBuffer<Bits> keys(static_cast<Bits*>(buffers.keys[0]), static_cast<Bits*>(buffers.keys[1]));
  cub::DoubleBuffer<std::uint32_t> values(buffers.values[0], buffers.values[1]);
  constexpr int bits = static_cast<int>(sizeof(Bits)) * 8;
  check_cuda(cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, values, n, 0, bits, stream), "sorting the scores");
  // CUB's number of passes is fixed, so the host knows which of the two buffers holds the result.
  buffers = {{keys.Current(), keys.Alternate()}, {values.Current(), values.Alternate()}, buffers.wide};
}

}  // namespace

std::size_t sort_temporary_bytes(std::uint32_t n, bool wide) {
  return wide ? temporary_bytes<std::uint64_t>(n) : temporary_bytes<std::uint32_t>(n);
}

void sort_by_key(SortBuffers& buffers, std::uint32_t n, void* temporary, std::size_t bytes, cudaStream_t stream) {
  buffers.wide ? sort<std::uint64_t>(buffers, n, temporary, bytes, stream)
               : sort<std::uint32_t>(buffers, n, temporary, bytes, stream);
}

}  // namespace raoe
