// What the device-wide kernels of the pairwise losses share: constants, the arrays in the workspace, how to read them.
#pragma once

#include "logsum.h"
#include "pieces.h"

namespace raoe {

constexpr int BLOCK = 256, ITEMS = 8, TILE = BLOCK * ITEMS;
constexpr int CLASSES = 16, COLUMNS = 1 + CLASSES;

template <class T>
struct State {
  T largest;                     // similarity
  T losses[2];                   // log(1 + Z) of rank and angle
  int nan;                       // an input holds one
  int classes;                   // distinct label values; CLASSES + 1 means more than CLASSES
  std::int64_t values[CLASSES];  // in their order
  std::uint32_t runs;
};

// Arrays in the workspace. (n) has an element a position of the sorted order, (tiles) one a tile.
template <class T>
struct Work {
  PairwiseArgs args;
  std::uint32_t n, tiles;
  State<T>* state;
  SortBuffers sort;                    // (n): orderable scores; where the pair is in the caller's order
  T* c;                                // (n)
  std::uint32_t* run;                  // (n): how many runs of equal scores are before the pair's own
  std::uint32_t* start;                // (n): of each run
  std::uint8_t* id;                    // (n): which of State::values the label is
  T *rank_below, *rank_above;          // (n): log of what is before (behind) a position
  T *angle_below, *angle_above;        // (n): P and Q, or with one column again log of what is before (behind)
  T* tile_largest;                     // (tiles)
  std::uint32_t* tile_heads;           // (tiles): runs that begin there, later how many begin before
  std::int64_t* tile_values;           // (tiles, CLASSES): the tile's distinct labels in their order
  int* tile_classes;                   // (tiles)
  LogSum<T> *tile_below, *tile_above;  // (COLUMNS, tiles): sums of a tile, later of all before (behind) it
  T *held_below, *held_above;          // (COLUMNS, tiles): log of what is before the tile's last run (behind its first)
  LogSum<T>* tile_joined;              // (2, tiles)

  // Whether a run begins at position p of the sorted order.
  RAOE_HD bool begins(std::int64_t p) const {
    if (p == 0) return true;
    if (sort.wide) {
      const auto* keys = static_cast<const std::uint64_t*>(sort.keys[0]);
      return keys[p] != keys[p - 1];
    }
    const auto* keys = static_cast<const std::uint32_t*>(sort.keys[0]);
    return keys[p] != keys[p - 1];
  }
  RAOE_HD std::int64_t first(std::int64_t p) const { return start[run[p]]; }
  RAOE_HD std::int64_t last(std::int64_t p) const {
    const std::uint32_t next = run[p] + 1;
    return (next < state->runs ? start[next] : n) - std::int64_t(1);
  }
  RAOE_HD std::int64_t rank(std::int64_t p) const { return doubled_rank(args.ties, p, first(p), last(p), run[p]); }

  // log of the sum over the rank objective's partners i of j = p, which come first in the order.
  RAOE_HD T rank_partners_below(std::int64_t p) const {
    const std::int64_t bound = rank(p) - args.threshold;
    if (bound < 0) return T(-INFINITY);
    const std::int64_t m = prefix_probe(bound);
    if (args.ties == Ties::dense) return rank_below[start[m + 1]];
    return rank_below[prefix_end(args.ties, bound, first(m), last(m))];
  }
  // The same over the partners j of i = p, which come last.
  RAOE_HD T rank_partners_above(std::int64_t p) const {
    const std::int64_t bound = rank(p) + args.threshold, m = suffix_probe(bound);
    if (m >= (args.ties == Ties::dense ? std::int64_t(state->runs) : std::int64_t(n))) return T(-INFINITY);
    if (args.ties == Ties::dense) return rank_above[std::int64_t(start[m]) - 1];
    return rank_above[suffix_start(args.ties, bound, first(m), last(m)) - 1];
  }

  // P and Q of the angular objective. A run may begin tiles before p: that tile has kept the value for it.
  RAOE_HD bool many_labels() const { return args.labels && state->classes > CLASSES; }
  RAOE_HD T angle_partners_below(std::int64_t p) const {
    const std::int64_t begin = first(p);
    if (!args.labels) return angle_below[begin];
    if (many_labels() || begin / TILE == p / TILE) return angle_below[p];
    return held_below[(1 + std::int64_t(id[p])) * tiles + begin / TILE];
  }
  RAOE_HD T angle_partners_above(std::int64_t p) const {
    const std::int64_t end = last(p);
    if (!args.labels) return angle_above[end];
    if (many_labels() || end / TILE == p / TILE) return angle_above[p];
    return held_above[(1 + std::int64_t(id[p])) * tiles + end / TILE];
  }

  // x of a position; y = -x. Both are shifted so that the largest similarity has 0.
  RAOE_HD T rank_x(std::int64_t p) const { return static_cast<T>(args.tau) * (c[p] - state->largest); }
  RAOE_HD T angle_x(std::int64_t p) const {
    return static_cast<T>(args.tau) * (angle(state->largest) - angle(c[p]));
  }

  RAOE_HD int angle_columns() const {
    if (!args.angle || many_labels()) return 0;
    return args.labels ? state->classes : 1;
  }
};

// The tile of this block and what of it belongs to this thread.
struct Place {
  std::int64_t tile_base, base;
  int valid;
  __device__ Place(std::int64_t tile, std::int64_t n) : tile_base(tile * TILE), base(tile_base + threadIdx.x * ITEMS) {
    const std::int64_t left = n - base;
    valid = left < 0 ? 0 : (left < ITEMS ? static_cast<int>(left) : ITEMS);
  }
};

// The phases, each in its own file, for T float and double. Kernels are queued on `stream`.
template <class T>
void prepare_keys(const Work<T>& work, cudaStream_t stream);  // before the sort
template <class T>
void index_runs(const Work<T>& work, cudaStream_t stream);  // behind it
template <class T>
void scan_columns(const Work<T>& work, cudaStream_t stream);
template <class T>
void join_and_differentiate(const Work<T>& work, cudaStream_t stream);

}  // namespace raoe
