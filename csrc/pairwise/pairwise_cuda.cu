// The pairwise losses of more pairs than one thread block holds: a device-wide sort, then scans in three phases over
// fixed tiles (the sum of each tile, a scan of the sums by one block, the tiles again), so that equal inputs give equal
// bits. Nothing is read back: what the host cannot know (the number of runs, the label values) stays in `State`.
//
// A column is one scan over all pairs: column 0 is the rank objective's; column 1 + k is the angular objective's for
// label value k, over the labels above it forwards and below it backwards. Without labels there is one such column.
#include <cub/block/block_scan.cuh>

#include <algorithm>

#include "../cuda_check.h"
#include "logsum_cuda.h"
#include "pairwise_cuda.h"

namespace raoe {
namespace {

constexpr int BLOCK = 256, ITEMS = 8, TILE = BLOCK * ITEMS;
constexpr int CLASSES = 16, COLUMNS = 1 + CLASSES;
constexpr unsigned OWNERS = 256;  // blocks that share the label values where there are more than CLASSES

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
template <class T, class Bits>
struct Work {
  PairwiseArgs args;
  std::uint32_t n, tiles;
  State<T>* state;
  SortBuffers<Bits> sort;              // after the sort: keys[0] (n), and values[0] (n): where the pair is for the caller
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
    return -static_cast<T>(args.tau) * (angle(c[p]) - angle(state->largest));
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

template <class T>
union Scratch {
  typename cub::BlockScan<std::uint32_t, BLOCK>::TempStorage count;
  LogSum<T> sums[BLOCK / 32 + 1];
  T maxima[BLOCK / 32 + 1];
  std::int64_t labels[BLOCK / 32 + 1];
};
#define RAOE_SCRATCH __shared__ __align__(16) Scratch<T> scratch

// 1. Keys to sort by; each tile's largest similarity and distinct labels.
template <class T, class Bits>
__global__ void __launch_bounds__(BLOCK) prepare(const Work<T, Bits> work) {
  RAOE_SCRATCH;
  const PairwiseArgs& args = work.args;
  const std::int64_t tile_base = std::int64_t(blockIdx.x) * TILE;
  std::int64_t labels[ITEMS];
  T largest = T(-INFINITY);
  bool nan = false;
  int valid = 0;
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const std::int64_t i = tile_base + k * BLOCK + threadIdx.x;
    labels[k] = 0;
    if (i < work.n) {
      work.sort.keys[0][i] = load_key<Bits>(args.scores, args.score_type, i, nan);
      work.sort.values[0][i] = static_cast<std::uint32_t>(i);
      const T similarity = load<T>(args.similarity, args.similarity_type, i);
      nan |= is_nan(similarity);
      if (largest < similarity) largest = similarity;
      if (args.labels) labels[k] = args.labels[i];
      valid = k + 1;
    }
  }
  largest = block_max<BLOCK>(largest, scratch.maxima);
  if (__syncthreads_or(nan) && threadIdx.x == 0) work.state->nan = 1;  // all that write write this
  if (threadIdx.x == 0) work.tile_largest[blockIdx.x] = largest;
  if (!args.labels) return;
  std::int64_t value = 0;
  int classes = 0;
  while (classes <= CLASSES && next_label<BLOCK>(labels, valid, classes == 0, value, scratch.labels, value)) {
    if (classes < CLASSES && threadIdx.x == 0) work.tile_values[std::int64_t(blockIdx.x) * CLASSES + classes] = value;
    ++classes;
  }
  if (threadIdx.x == 0) work.tile_classes[blockIdx.x] = classes;
}

template <class T, class Bits>
__device__ bool head(const Work<T, Bits>& work, std::int64_t p) {
  return p == 0 || work.sort.keys[0][p] != work.sort.keys[0][p - 1];
}

// 2. After the sort: how many runs begin in each tile.
template <class T, class Bits>
__global__ void __launch_bounds__(BLOCK) count_heads(const Work<T, Bits> work) {
  __shared__ std::uint32_t shared[BLOCK / 32 + 1];
  std::uint32_t heads = 0;
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const std::int64_t p = std::int64_t(blockIdx.x) * TILE + k * BLOCK + threadIdx.x;
    if (p < work.n) {
      heads += head(work, p);
      work.c[p] = load<T>(work.args.similarity, work.args.similarity_type, work.sort.values[0][p]);
    }
  }
  heads = block_reduce<BLOCK>(heads, std::uint32_t(0), shared, [](std::uint32_t a, std::uint32_t b) { return a + b; });
  if (threadIdx.x == 0) work.tile_heads[blockIdx.x] = heads;
}

// 3. One block: what the tiles found, together.
template <class T, class Bits>
__global__ void __launch_bounds__(BLOCK) collect(const Work<T, Bits> work) {
  RAOE_SCRATCH;
  State<T>& state = *work.state;
  T largest = T(-INFINITY);
  std::uint32_t runs = 0;
  for (std::uint32_t base = 0; base < work.tiles; base += BLOCK) {
    const std::uint32_t t = base + threadIdx.x;
    if (t < work.tiles && largest < work.tile_largest[t]) largest = work.tile_largest[t];
    std::uint32_t heads = t < work.tiles ? work.tile_heads[t] : 0, sum = 0;
    cub::BlockScan<std::uint32_t, BLOCK>(scratch.count).ExclusiveSum(heads, heads, sum);
    if (t < work.tiles) work.tile_heads[t] = runs + heads;
    runs += sum;
    __syncthreads();
  }
  largest = block_max<BLOCK>(largest, scratch.maxima);
  if (threadIdx.x == 0) {
    state.largest = largest;
    state.runs = runs;
  }
  if (!work.args.labels) return;
  int classes = 0;
  std::int64_t value = 0;
  for (bool more = true; more && classes <= CLASSES;) {
    bool found = false;
    std::int64_t least = INT64_MAX;
    for (std::uint32_t t = threadIdx.x; t < work.tiles; t += BLOCK) {
      const int count = work.tile_classes[t];
      if (count > CLASSES) classes = CLASSES + 1;
      for (int k = 0; k < count && k < CLASSES; ++k) {
        const std::int64_t label = work.tile_values[std::int64_t(t) * CLASSES + k];
        if (classes == 0 || classes > CLASSES || label > value) {
          found = true;
          least = label < least ? label : least;
          break;  // a tile's values ascend
        }
      }
    }
    if (__syncthreads_or(classes > CLASSES)) {
      classes = CLASSES + 1;
      break;
    }
    value = block_min<BLOCK>(least, scratch.labels);
    more = __syncthreads_or(found);
    if (more && classes < CLASSES && threadIdx.x == 0) state.values[classes] = value;
    classes += more;
  }
  if (threadIdx.x == 0) state.classes = classes;
}

// The part of an angular column that is summed forwards (backwards): x (y = -x) of the labels above (below) `value`.
template <bool Reverse, class T>
__device__ __forceinline__ void mask_column(const T (&x)[ITEMS], const int (&id)[ITEMS], bool gated, int value, int valid,
                                            T (&part)[ITEMS]) {
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const bool in = k < valid && (!gated || (Reverse ? id[k] < value : id[k] > value));
    part[k] = in ? (Reverse ? -x[k] : x[k]) : T(-INFINITY);
  }
}

// 4. Runs and dense labels of all positions; the sum of each tile and column.
template <class T, class Bits>
__global__ void __launch_bounds__(BLOCK) index_and_sum(const Work<T, Bits> work) {
  RAOE_SCRATCH;
  const PairwiseArgs& args = work.args;
  const std::int64_t tile = blockIdx.x;
  const Place at(tile, work.n);
  const int columns = work.angle_columns();
  bool begins[ITEMS];
  std::uint32_t heads = 0;
  T x[ITEMS], part[ITEMS];
  int id[ITEMS];
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const std::int64_t p = at.base + k;
    begins[k] = k < at.valid && head(work, p);
    heads += begins[k];
    id[k] = 0;
    if (k < at.valid && columns && args.labels) {
      const std::int64_t label = args.labels[work.sort.values[0][p]];
      while (id[k] + 1 < columns && work.state->values[id[k]] != label) ++id[k];
      work.id[p] = static_cast<std::uint8_t>(id[k]);
    }
  }
  cub::BlockScan<std::uint32_t, BLOCK>(scratch.count).ExclusiveSum(heads, heads);
  heads += work.tile_heads[tile];
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    if (begins[k]) work.start[heads++] = static_cast<std::uint32_t>(at.base + k);
    if (k < at.valid) work.run[at.base + k] = heads - 1;
  }
  __syncthreads();
  const bool gated = args.labels;
  const int no_id[ITEMS] = {};
  if (args.rank) {
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) x[k] = k < at.valid ? work.rank_x(at.base + k) : T(0);
    mask_column<false>(x, no_id, false, 0, at.valid, part);
    const LogSum<T> below = tile_sum<BLOCK>(part, scratch.sums);
    mask_column<true>(x, no_id, false, 0, at.valid, part);
    const LogSum<T> above = tile_sum<BLOCK>(part, scratch.sums);
    if (threadIdx.x == 0) {
      work.tile_below[tile] = below;
      work.tile_above[tile] = above;
    }
  }
  if (!columns) return;
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) x[k] = k < at.valid ? work.angle_x(at.base + k) : T(0);
  for (int value = 0; value < columns; ++value) {
    mask_column<false>(x, id, gated, value, at.valid, part);
    const LogSum<T> below = tile_sum<BLOCK>(part, scratch.sums);
    mask_column<true>(x, id, gated, value, at.valid, part);
    const LogSum<T> above = tile_sum<BLOCK>(part, scratch.sums);
    if (threadIdx.x == 0) {
      work.tile_below[std::int64_t(1 + value) * work.tiles + tile] = below;
      work.tile_above[std::int64_t(1 + value) * work.tiles + tile] = above;
    }
  }
}

// 5. Two blocks a column: sums of the tiles become sums over all tiles before (behind).
template <bool Reverse, class T>
__device__ void scan_tiles(LogSum<T>* sums, std::int64_t tiles, LogSum<T>* shared) {
  LogSum<T> before = no_terms<T>();
  for (std::int64_t base = 0; base < tiles; base += BLOCK) {
    // The thread order stays that of the tiles: a backward scan takes its chunks from the end.
    const std::int64_t t = Reverse ? tiles - base - BLOCK + threadIdx.x : base + threadIdx.x;
    const bool in = t >= 0 && t < tiles;
    LogSum<T> total;
    const LogSum<T> earlier = block_exclusive<Reverse, BLOCK>(in ? sums[t] : no_terms<T>(), shared, total);
    if (in) sums[t] = plus(before, earlier);
    before = plus(before, total);
  }
}

template <class T, class Bits>
__global__ void __launch_bounds__(BLOCK) scan_sums(const Work<T, Bits> work) {
  RAOE_SCRATCH;
  const int column = blockIdx.x / 2;
  if (column == 0 ? !work.args.rank : column > work.angle_columns()) return;
  const std::int64_t offset = std::int64_t(column) * work.tiles;
  if (blockIdx.x % 2) {
    scan_tiles<true>(work.tile_above + offset, work.tiles, scratch.sums);
  } else {
    scan_tiles<false>(work.tile_below + offset, work.tiles, scratch.sums);
  }
}

// 6. The scans themselves.
template <class T, class Bits>
__global__ void __launch_bounds__(BLOCK) scan_positions(const Work<T, Bits> work) {
  RAOE_SCRATCH;
  __shared__ T table[TILE];
  const PairwiseArgs& args = work.args;
  const std::int64_t tile = blockIdx.x, tiles = work.tiles;
  const Place at(tile, work.n);
  const std::int64_t tile_end = at.tile_base + TILE < work.n ? at.tile_base + TILE : work.n;
  const int columns = work.angle_columns();
  T x[ITEMS], part[ITEMS];
  int id[ITEMS];
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) id[k] = k < at.valid && columns && args.labels ? work.id[at.base + k] : 0;

  for (int column = args.rank ? 0 : 1; column <= columns; ++column) {
    const bool whole = column == 0 || !args.labels;  // read at any position later: the table itself is the result
    const int value = column - 1;
    if (column < 2) {
#pragma unroll
      for (int k = 0; k < ITEMS; ++k) {
        x[k] = k < at.valid ? (column ? work.angle_x(at.base + k) : work.rank_x(at.base + k)) : T(0);
      }
    }
    T* const below = column ? work.angle_below : work.rank_below;
    T* const above = column ? work.angle_above : work.rank_above;
    mask_column<false>(x, id, !whole, value, at.valid, part);
    tile_scan<false, BLOCK>(part, work.tile_below[column * tiles + tile], table, scratch.sums);
    for (int k = 0; k < ITEMS; ++k) {
      const std::int64_t p = at.base + k;
      if (k >= at.valid) break;
      if (whole) {
        below[p] = table[p - at.tile_base];
      } else if (id[k] == value && work.first(p) >= at.tile_base) {
        below[p] = table[work.first(p) - at.tile_base];
      }
    }
    if (!whole && threadIdx.x == 0 && work.first(tile_end - 1) >= at.tile_base) {
      work.held_below[column * tiles + tile] = table[work.first(tile_end - 1) - at.tile_base];
    }
    __syncthreads();
    if (!args.grads) continue;
    mask_column<true>(x, id, !whole, value, at.valid, part);
    tile_scan<true, BLOCK>(part, work.tile_above[column * tiles + tile], table, scratch.sums);
    for (int k = 0; k < ITEMS; ++k) {
      const std::int64_t p = at.base + k;
      if (k >= at.valid) break;
      if (whole) {
        above[p] = table[p - at.tile_base];
      } else if (id[k] == value && work.last(p) < tile_end) {
        above[p] = table[work.last(p) - at.tile_base];
      }
    }
    if (!whole && threadIdx.x == 0 && work.last(at.tile_base) < tile_end) {
      work.held_above[column * tiles + tile] = table[work.last(at.tile_base) - at.tile_base];
    }
    __syncthreads();
  }
}

// 6b. More than CLASSES label values: each block owns every OWNERS-th of them and walks over all pairs for it.
template <bool Reverse, class T, class Bits>
__device__ void walk(const Work<T, Bits>& work, std::int64_t value, T* table, LogSum<T>* shared) {
  const std::int64_t tiles = work.tiles;
  LogSum<T> before = no_terms<T>();
  T held = T(-INFINITY);  // log of what is before the last run so far (Reverse: behind the first)
  for (std::int64_t step = 0; step < tiles; ++step) {
    const Place at(Reverse ? tiles - 1 - step : step, work.n);
    const std::int64_t tile_end = at.tile_base + TILE < work.n ? at.tile_base + TILE : work.n;
    T part[ITEMS];
    bool own[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
      part[k] = T(-INFINITY);
      own[k] = false;
      if (k < at.valid) {
        const std::int64_t label = work.args.labels[work.sort.values[0][at.base + k]];
        own[k] = label == value;
        const T x = work.angle_x(at.base + k);
        if (Reverse ? label < value : label > value) part[k] = Reverse ? -x : x;
      }
    }
    before = tile_scan<Reverse, BLOCK>(part, before, table, shared);
#pragma unroll
    for (int k = 0; k < ITEMS; ++k) {
      if (!own[k]) continue;
      const std::int64_t p = at.base + k, edge = Reverse ? work.last(p) : work.first(p);
      const bool here = Reverse ? edge < tile_end : edge >= at.tile_base;
      (Reverse ? work.angle_above : work.angle_below)[p] = here ? table[edge - at.tile_base] : held;
    }
    const std::int64_t edge = Reverse ? work.last(at.tile_base) : work.first(tile_end - 1);
    if (Reverse ? edge < tile_end : edge >= at.tile_base) held = table[edge - at.tile_base];
    __syncthreads();
  }
}

template <class T, class Bits>
__global__ void __launch_bounds__(BLOCK) walk_many_labels(const Work<T, Bits> work) {
  RAOE_SCRATCH;
  __shared__ T table[TILE];
  if (!work.many_labels()) return;
  std::int64_t value = 0;
  for (unsigned count = 0;; ++count) {
    bool found = false;
    std::int64_t least = INT64_MAX;
    for (std::int64_t i = threadIdx.x; i < work.n; i += BLOCK) {
      const std::int64_t label = work.args.labels[i];
      if (count == 0 || label > value) {
        found = true;
        least = label < least ? label : least;
      }
    }
    value = block_min<BLOCK>(least, scratch.labels);
    if (!__syncthreads_or(found)) return;
    if (count % gridDim.x != blockIdx.x) continue;
    walk<false>(work, value, table, scratch.sums);
    if (work.args.grads) walk<true>(work, value, table, scratch.sums);
  }
}

// 7. Z of each tile: its j with all their partners.
template <class T, class Bits>
__global__ void __launch_bounds__(BLOCK) join(const Work<T, Bits> work) {
  RAOE_SCRATCH;
  T rank[ITEMS], angular[ITEMS];
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const std::int64_t p = std::int64_t(blockIdx.x) * TILE + k * BLOCK + threadIdx.x;
    rank[k] = p < work.n && work.args.rank ? work.rank_partners_below(p) - work.rank_x(p) : T(-INFINITY);
    angular[k] = p < work.n && work.args.angle ? work.angle_partners_below(p) - work.angle_x(p) : T(-INFINITY);
  }
  const LogSum<T> rank_sum = tile_sum<BLOCK>(rank, scratch.sums), angle_sum = tile_sum<BLOCK>(angular, scratch.sums);
  if (threadIdx.x == 0) {
    work.tile_joined[blockIdx.x] = rank_sum;
    work.tile_joined[work.tiles + blockIdx.x] = angle_sum;
  }
}

// 8. One block: the losses.
template <class T, class Bits>
__global__ void __launch_bounds__(BLOCK) finish(const Work<T, Bits> work) {
  RAOE_SCRATCH;
  const PairwiseArgs& args = work.args;
  T losses[2];
  for (int part = 0; part < 2; ++part) {
    LogSum<T> sum = no_terms<T>();
    for (std::int64_t t = threadIdx.x; t < work.tiles; t += BLOCK) {
      sum = plus(sum, work.tile_joined[part * std::int64_t(work.tiles) + t]);
    }
    losses[part] = softplus(log_of(block_sum<BLOCK>(sum, scratch.sums)));
  }
  if (threadIdx.x) return;
  const T poison = work.state->nan ? T(NAN) : T(0);
  const T rank = static_cast<T>(args.rank_weight) * losses[0], angular = static_cast<T>(args.angle_weight) * losses[1];
  T* const rows = static_cast<T*>(args.losses);
  work.state->losses[0] = losses[0];
  work.state->losses[1] = losses[1];
  if (args.parts) {
    rows[0] = (args.rank ? rank : T(0)) + poison;
    rows[1] = (args.angle ? angular : T(0)) + poison;
  } else {
    rows[0] = (args.rank ? rank : T(0)) + (args.angle ? angular : T(0)) + poison;
  }
}

// 9. The gradient: dL/dx = exp(x + Q - L), dL/dy = exp(y + P - L), in the caller's order.
template <class T, class Bits>
__global__ void __launch_bounds__(BLOCK) gradient(const Work<T, Bits> work) {
  const PairwiseArgs& args = work.args;
  const std::int64_t p = std::int64_t(blockIdx.x) * BLOCK + threadIdx.x;
  if (p >= work.n) return;
  T rank = T(0), angular = T(0);
  if (args.rank) {
    const T x = work.rank_x(p), loss = work.state->losses[0];
    rank = static_cast<T>(args.tau * args.rank_weight) *
           (exp(x + work.rank_partners_above(p) - loss) - exp(work.rank_partners_below(p) - x - loss));
  }
  if (args.angle) {
    const T x = work.angle_x(p), loss = work.state->losses[1];
    angular = static_cast<T>(args.tau * args.angle_weight) * angle_slope(work.c[p]) *
              (exp(x + work.angle_partners_above(p) - loss) - exp(work.angle_partners_below(p) - x - loss));
  }
  const T poison = work.state->nan ? T(NAN) : T(0);
  T* const row = static_cast<T*>(args.grads);
  const std::int64_t i = work.sort.values[0][p];
  if (args.parts) {
    row[i] = rank + poison;
    row[work.n + i] = angular + poison;
  } else {
    row[i] = rank + angular + poison;
  }
}

// Lays the arrays out behind `base`; returns how many bytes they take. With base = null only that is of use.
template <class T, class Bits>
std::size_t lay_out(const PairwiseArgs& args, unsigned char* base, Work<T, Bits>& work, void*& temporary,
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
  for (int i = 0; i < 2; ++i) {
    take(work.sort.keys[i], n);
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
  temporary_bytes = sort_temporary_bytes(work.n, sizeof(Bits) == 8);
  unsigned char* sort_memory = nullptr;
  take(sort_memory, temporary_bytes);
  temporary = sort_memory;
  return used;
}

template <class T, class Bits>
void run(const PairwiseArgs& args, void* workspace, cudaStream_t stream) {
  Work<T, Bits> work{};
  void* temporary = nullptr;
  std::size_t bytes = 0;
  lay_out(args, static_cast<unsigned char*>(workspace), work, temporary, bytes);
  check_cuda(cudaMemsetAsync(work.state, 0, sizeof(State<T>), stream), "clearing the state");
  const auto launched = [] { check_cuda(cudaGetLastError(), "the pairwise losses"); };
  prepare<<<work.tiles, BLOCK, 0, stream>>>(work);
  launched();
  sort_by_key(work.sort, work.n, temporary, bytes, stream);
  count_heads<<<work.tiles, BLOCK, 0, stream>>>(work);
  launched();
  collect<<<1, BLOCK, 0, stream>>>(work);
  launched();
  index_and_sum<<<work.tiles, BLOCK, 0, stream>>>(work);
  launched();
  scan_sums<<<2 * (args.labels ? COLUMNS : 2), BLOCK, 0, stream>>>(work);
  launched();
  scan_positions<<<work.tiles, BLOCK, 0, stream>>>(work);
  launched();
  if (args.labels && args.angle) {
    walk_many_labels<<<OWNERS, BLOCK, 0, stream>>>(work);
    launched();
  }
  join<<<work.tiles, BLOCK, 0, stream>>>(work);
  launched();
  finish<<<1, BLOCK, 0, stream>>>(work);
  launched();
  if (args.grads) {
    gradient<<<(work.n - 1) / BLOCK + 1, BLOCK, 0, stream>>>(work);
    launched();
  }
}

template <class T, class Bits>
std::size_t workspace_bytes(const PairwiseArgs& args) {
  Work<T, Bits> work{};
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
  if (args.n <= ONE_BLOCK_PAIRS) return 0;
  if (args.n > INT32_MAX) throw std::invalid_argument("at most 2^31 - 1 pairs, got " + std::to_string(args.n));
  const bool wide = args.similarity_type == Float::f64;
  if (args.score_type == Key::f32) {
    return wide ? workspace_bytes<double, std::uint32_t>(args) : workspace_bytes<float, std::uint32_t>(args);
  }
  return wide ? workspace_bytes<double, std::uint64_t>(args) : workspace_bytes<float, std::uint64_t>(args);
}

void pairwise_cuda(const PairwiseArgs& given, void* workspace, void* stream_handle) {
  const PairwiseArgs args = without_unused(given);
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const bool wide = args.similarity_type == Float::f64;
  if (args.n <= ONE_BLOCK_PAIRS) return pairwise_one_block(args, stream);
  if (args.score_type == Key::f32) {
    return wide ? run<double, std::uint32_t>(args, workspace, stream) : run<float, std::uint32_t>(args, workspace, stream);
  }
  return wide ? run<double, std::uint64_t>(args, workspace, stream) : run<float, std::uint64_t>(args, workspace, stream);
}

}  // namespace raoe
