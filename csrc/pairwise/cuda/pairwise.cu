// The pairwise losses of more pairs than one thread block holds: a device-wide sort, then scans in three phases over
// fixed tiles (the sum of each tile, a scan of the sums by one block, the tiles again), so that equal inputs give equal
// bits. Nothing is read back: what the host cannot know (the number of runs, the label values) stays in `State`.
//
// A column is one scan over all pairs: column 0 is the rank objective's; column 1 + k is the angular objective's for
// label value k, over the labels above it forwards and below it backwards. Without labels there is one such column.
#include <string>

#include "../../cuda_check.h"
#include "tiles.h"

namespace raoe {
namespace {

// Lays the arrays out behind `base`; returns how many bytes they take, which is all that base = null is good for.
template <class T>
std::size_t lay_out(const PairwiseArgs& args, unsigned char* base, Work<T>& work, void*& temporary,
                    std::size_t& temporary_bytes) {
  std::size_t used = 0;
  const auto take = [&](auto*& pointer, std::size_t count) {
    using Element = std::remove_reference_t<decltype(*pointer)>;
    pointer = base ? reinterpret_cast<Element*>(base + used) : nullptr;
    used += (count * sizeof(Element) + 255) / 256 * 256;
  };
  work.args = args;
  work.n = static_cast<std::uint32_t>(args.n);
  work.tiles = (work.n - 1) / TILE + 1;
  const std::size_t n = work.n, tiles = work.tiles;
  const std::size_t ranked = args.rank ? n : 0, angled = args.angle ? n : 0, gated = args.labels ? 1 : 0;
  take(work.state, 1);
  work.sort.wide = args.score_type != Key::f32;
  for (int i = 0; i < 2; ++i) {
    unsigned char* keys = nullptr;
    take(keys, n * (work.sort.wide ? 8 : 4));
    work.sort.keys[i] = keys;
    take(work.sort.values[i], n);
  }
  take(work.c, n);
  take(work.run, n);
  take(work.start, n);
  take(work.id, gated * n);
  take(work.rank_below, ranked);
  take(work.rank_above, args.grads ? ranked : 0);
  take(work.angle_below, angled);
  take(work.angle_above, args.grads ? angled : 0);
  take(work.tile_largest, tiles);
  take(work.tile_heads, tiles);
  take(work.tile_values, gated * tiles * CLASSES);
  take(work.tile_classes, gated * tiles);
  take(work.tile_below, tiles * COLUMNS);
  take(work.tile_above, tiles * COLUMNS);
  take(work.held_below, gated * tiles * COLUMNS);
  take(work.held_above, gated * tiles * COLUMNS);
  take(work.tile_joined, tiles * 2);
  temporary_bytes = sort_temporary_bytes(work.n, work.sort.wide);
  unsigned char* sort_memory = nullptr;
  take(sort_memory, temporary_bytes);
  temporary = sort_memory;
  return used;
}

template <class T>
void run(const PairwiseArgs& args, void* workspace, cudaStream_t stream) {
  Work<T> work{};
  void* temporary = nullptr;
  std::size_t bytes = 0;
  lay_out(args, static_cast<unsigned char*>(workspace), work, temporary, bytes);
  check_cuda(cudaMemsetAsync(work.state, 0, sizeof(State<T>), stream), "clearing the state");
  prepare_keys(work, stream);
  sort_by_key(work.sort, work.n, temporary, bytes, stream);
  index_runs(work, stream);
  scan_columns(work, stream);
  join_and_differentiate(work, stream);
}

template <class T>
std::size_t workspace_bytes(const PairwiseArgs& args) {
  Work<T> work{};
  void* temporary = nullptr;
  std::size_t bytes = 0;
  return lay_out(args, nullptr, work, temporary, bytes);
}

// What no gate uses is ignored.
PairwiseArgs without_unused(PairwiseArgs args) {
  if (!args.angle) args.labels = nullptr;
  return args;
}

}  // namespace

std::size_t pairwise_cuda_workspace(const PairwiseArgs& given) {
  const PairwiseArgs args = without_unused(given);
  if (args.n <= one_block_pairs(args.similarity_type)) return 0;
  if (args.n > INT32_MAX) throw std::invalid_argument("at most 2^31 - 1 pairs, got " + std::to_string(args.n));
  return args.similarity_type == Float::f64 ? workspace_bytes<double>(args) : workspace_bytes<float>(args);
}

void pairwise_cuda(const PairwiseArgs& given, void* workspace, void* stream_handle) {
  const PairwiseArgs args = without_unused(given);
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (args.n <= one_block_pairs(args.similarity_type)) return pairwise_one_block(args, stream);
  args.similarity_type == Float::f64 ? run<double>(args, workspace, stream) : run<float>(args, workspace, stream);
}

}  // namespace raoe
