// The scans of the device-wide pairwise losses, in three phases over fixed tiles.
#include "../../cuda_check.h"
#include "tiles.h"

namespace raoe {
namespace {

constexpr unsigned OWNERS = 256;  // blocks that share the label values where there are more than CLASSES

// The part of an angular column that is summed forwards (backwards): x (y = -x) of the labels above (below) `value`.
template <bool Reverse, class T>
__device__ __forceinline__ void mask_column(const T (&x)[ITEMS], const int (&id)[ITEMS], bool gated, int value,
                                            int valid, T (&part)[ITEMS]) {
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const bool in = k < valid && (!gated || (Reverse ? id[k] < value : id[k] > value));
    part[k] = in ? (Reverse ? -x[k] : x[k]) : T(-INFINITY);
  }
}

// 5. The sum of each tile and column.
template <class T>
__global__ void __launch_bounds__(BLOCK) sum_tiles(const Work<T> work) {
  __shared__ LogSum<T> shared[BLOCK / 32 + 1];
  const std::int64_t tile = blockIdx.x, tiles = work.tiles;
  const Place at(tile, work.n);
  const int columns = work.angle_columns();
  T x[ITEMS], part[ITEMS];
  int id[ITEMS];
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) id[k] = k < at.valid && columns && work.args.labels ? work.id[at.base + k] : 0;

  for (int column = work.args.rank ? 0 : 1; column <= columns; ++column) {
    const bool gated = column > 0 && work.args.labels;
    if (column < 2) {
#pragma unroll
      for (int k = 0; k < ITEMS; ++k) {
        x[k] = k < at.valid ? (column ? work.angle_x(at.base + k) : work.rank_x(at.base + k)) : T(0);
      }
    }
    mask_column<false>(x, id, gated, column - 1, at.valid, part);
    const LogSum<T> below = tile_sum<BLOCK>(part, shared);
    if (threadIdx.x == 0) work.tile_below[column * tiles + tile] = below;
    if (!work.args.grads) continue;
    mask_column<true>(x, id, gated, column - 1, at.valid, part);
    const LogSum<T> above = tile_sum<BLOCK>(part, shared);
    if (threadIdx.x == 0) work.tile_above[column * tiles + tile] = above;
  }
}

// 6. Two blocks a column: sums of the tiles become sums over all tiles before (behind).
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

template <class T>
__global__ void __launch_bounds__(BLOCK) scan_sums(const Work<T> work) {
  __shared__ LogSum<T> shared[BLOCK / 32 + 1];
  const int column = blockIdx.x / 2;
  if (column == 0 ? !work.args.rank : column > work.angle_columns()) return;
  const std::int64_t offset = std::int64_t(column) * work.tiles;
  if (blockIdx.x % 2) {
    if (!work.args.grads) return;
    scan_tiles<true>(work.tile_above + offset, work.tiles, shared);
  } else {
    scan_tiles<false>(work.tile_below + offset, work.tiles, shared);
  }
}

// 7. The scans themselves.
template <class T>
__global__ void __launch_bounds__(BLOCK) scan_positions(const Work<T> work) {
  __shared__ LogSum<T> shared[BLOCK / 32 + 1];
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
    tile_scan<false, BLOCK>(part, work.tile_below[column * tiles + tile], table, shared);
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
    tile_scan<true, BLOCK>(part, work.tile_above[column * tiles + tile], table, shared);
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

// 7b. More than CLASSES label values: each block owns every OWNERS-th of them and walks over all pairs for it.
template <bool Reverse, class T>
__device__ void walk(const Work<T>& work, std::int64_t value, T* table, LogSum<T>* shared) {
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

template <class T>
__global__ void __launch_bounds__(BLOCK) walk_many_labels(const Work<T> work) {
  __shared__ std::int64_t minima[BLOCK / 32 + 1];
  __shared__ LogSum<T> shared[BLOCK / 32 + 1];
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
    value = block_min<BLOCK>(least, minima);
    if (!__syncthreads_or(found)) return;
    if (count % gridDim.x != blockIdx.x) continue;
    walk<false>(work, value, table, shared);
    if (work.args.grads) walk<true>(work, value, table, shared);
  }
}

void launched() { check_cuda(cudaGetLastError(), "the scans of the pairwise losses"); }

}  // namespace

template <class T>
void scan_columns(const Work<T>& work, cudaStream_t stream) {
  sum_tiles<<<work.tiles, BLOCK, 0, stream>>>(work);
  launched();
  scan_sums<<<2 * (work.args.labels ? COLUMNS : 2), BLOCK, 0, stream>>>(work);
  launched();
  scan_positions<<<work.tiles, BLOCK, 0, stream>>>(work);
  launched();
  if (work.args.labels) {
    walk_many_labels<<<OWNERS, BLOCK, 0, stream>>>(work);
    launched();
  }
}

template void scan_columns(const Work<float>&, cudaStream_t);
template void scan_columns(const Work<double>&, cudaStream_t);

}  // namespace raoe
