// The pairwise losses of more pairs than fit into one thread block: write the keys, sort with the whole GPU, and run
// solve.h in one cooperative launch. The host reads nothing back: all decisions about the data are made on the device.
#include "../../cuda_check.h"
#include "blocks.h"

namespace raoe {
namespace {

// Place the arrays in the memory at `base` and return their size in bytes. With base = null, only the size is valid.
template <class T>
std::size_t lay_out(const PairwiseArgs& args, unsigned char* base, Work<T>& work, unsigned char*& temporary,
                    std::size_t& temporary_bytes) {
  std::size_t used = 0;
  const auto take = [&](auto*& pointer, std::size_t count) {
    using Element = std::remove_reference_t<decltype(*pointer)>;
    pointer = base ? reinterpret_cast<Element*>(base + used) : nullptr;
    used += (count * sizeof(Element) + 255) / 256 * 256;
  };
  constexpr std::size_t tile = BLOCK * ITEMS<T>;
  Crossing<T>& all = work.crossing;
  auto& at = work.at;
  all.n = static_cast<std::uint32_t>(args.n);
  all.tiles = static_cast<std::uint32_t>((args.n - 1) / tile + 1);
  all.wide = args.score_type != Key::f32;
  work.args = args;
  work.sort.wide = all.wide;
  work.room = static_cast<float>(linear_room(true, args.n));
  const std::size_t n = all.n, tiles = all.tiles, padded = tiles * tile, angle_size = args.angle ? n : 0;
  for (int i = 0; i < 2; ++i) {
    unsigned char* keys = nullptr;
    take(keys, padded * (all.wide ? 8 : 4));
    work.sort.keys[i] = keys;
    take(work.sort.values[i], padded);
  }
  take(at.before, args.rank ? padded : 0);
  take(at.after, args.rank ? padded + 1 : 0);
  take(at.ends, args.rank ? 2 * padded + ENDS_AHEAD / sizeof(*at.ends) : 0);
  at.ends += ENDS_AHEAD / sizeof(*at.ends);
  take(at.rank, n);
  take(at.run, n);
  take(at.label, angle_size);
  take(at.term, angle_size);
  take(at.below, angle_size);
  take(at.above, angle_size);
  take(at.order[0], angle_size);
  take(at.order[1], angle_size);
  const bool same_type = args.similarity_type == (sizeof(T) == 4 ? Float::f32 : Float::f64);
  take(work.converted, same_type ? 0 : n);
  all.similarity = same_type ? static_cast<const T*>(args.similarity) : work.converted;
  if (same_type) work.converted = nullptr;
  take(work.extents, PREPARING_BLOCKS);
  take(all.spans, 2 * (tiles + 1) * SPAN_BYTES);
  take(all.joined, tiles * BOTH_BYTES);
  take(all.arrived, 1);
  temporary_bytes = sort_temporary_bytes(all.n, all.wide);
  take(temporary, temporary_bytes);
  return used;
}

template <class T>
std::size_t run(const PairwiseArgs& args, unsigned char* workspace, cudaStream_t stream) {
  Work<T> work{};
  unsigned char* temporary = nullptr;
  std::size_t bytes = 0;
  const std::size_t all = lay_out(args, workspace, work, temporary, bytes);
  if (workspace == nullptr) return all;
  const std::uint32_t tiles = work.crossing.tiles;
  work.preparing = 2 * tiles < PREPARING_BLOCKS ? 2 * tiles : PREPARING_BLOCKS;
  prepare<T><<<work.preparing, BLOCK, 0, stream>>>(work);
  check_cuda(cudaGetLastError(), "the keys of the pairwise losses");
  sort_by_key(work.sort, work.crossing.n, temporary, bytes, stream);
  work.crossing.keys = work.sort.keys[0];
  work.crossing.pairs = work.sort.values[0];
  int resident = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, all_blocks<T>, BLOCK, BlocksTiles<T>::scratch_bytes),
             "the number of resident blocks");
  const unsigned max_blocks = resident * device_attribute(cudaDevAttrMultiProcessorCount);
  void* arguments[] = {&work};
  check_cuda(cudaLaunchCooperativeKernel(all_blocks<T>, tiles < max_blocks ? tiles : max_blocks, BLOCK, arguments,
                                         BlocksTiles<T>::scratch_bytes, stream),
             "the pairwise losses");
  return all;
}

}  // namespace

const char* pairwise_cuda_unusable() { return unusable(prepare<float>); }

std::size_t many_blocks(const PairwiseArgs& args, unsigned char* workspace, cudaStream_t stream) {
  return args.similarity_type == Float::f64 ? run<double>(args, workspace, stream) : run<float>(args, workspace, stream);
}

}  // namespace raoe
