// The tiles of a launch: reading their pairs, and sums over all tiles.
//
// Positions in the order of the scores are cut into tiles of Block * Items; a thread has Items consecutive positions.
// Sums over all tiles take three steps: sum each tile; in one block, add up the tiles before and after each tile; visit
// each tile again. A launch is either a single thread block, which has one tile and all arrays in shared memory, or
// cooperative, with arrays in the workspace.
#pragma once

#include "pairs.h"

namespace raoe {

struct OneBlock {
  static constexpr bool one = true;
  static __device__ unsigned index() { return 0; }
  static __device__ unsigned count() { return 1; }
};

// Z of both objectives.
template <class Sum>
struct Both {
  Sum rank{}, angle{};
};
template <class Sum>
__device__ __forceinline__ Both<Sum> operator+(const Both<Sum>& a, const Both<Sum>& b) {
  return {a.rank + b.rank, a.angle + b.angle};
}

template <class T_, int Block_, int Items, class Index_, class Blocks_>
struct Tiles {
  using T = T_;
  using Index = Index_;
  using Blocks = Blocks_;
  using Pairs = ThreadTile<T, Items>;
  static constexpr int Block = Block_, items = Items;
  static constexpr std::size_t scratch_bytes = (Block / 32 + 1) * SPAN_BYTES;

  const PairwiseArgs& args;
  Arrays<T, Index> at;
  const Crossing<T>* crossing;  // null for one block
  unsigned char* scratch;       // shared memory
  Extent<T> extent;             // of all inputs

  __device__ std::uint32_t n() const { return static_cast<std::uint32_t>(args.n); }
  __device__ std::uint32_t count() const {
    if constexpr (Blocks::one) return 1;
    else return crossing->tiles;
  }
  template <class V>
  __device__ V* shared() const {
    static_assert(sizeof(V) <= SPAN_BYTES, "see scratch_bytes");
    return reinterpret_cast<V*>(scratch);
  }
  __device__ void sync() const {
    if constexpr (Blocks::one) __syncthreads();
    else Blocks::sync(crossing->arrived);
  }
  __device__ std::uint64_t label_range() const {  // unsigned, because the difference of two labels may not fit int64
    return static_cast<std::uint64_t>(extent.label_high) - static_cast<std::uint64_t>(extent.label_low);
  }
  __device__ T middle() const { return T(0.5) * extent.low + T(0.5) * extent.high; }
  __device__ T middle_angle() const { return T(0.5) * (angle(extent.low) + angle(extent.high)); }
  // With a threshold of 2 n or more, the rank objective has no pairs.
  __device__ int threshold() const { return static_cast<int>(args.threshold < 2 * args.n ? args.threshold : 2 * args.n); }

  // ---- Reading pairs. Several blocks read the sorted arrays. A single block keeps the pairs of its own sort. ----

  __device__ void place(Pairs& my, std::uint32_t tile) const { my.place((tile * Block + threadIdx.x) * Items, n()); }
  template <class Bits>
  __device__ __forceinline__ void read_heads(Pairs& my) const {
    const Bits* const keys = static_cast<const Bits*>(crossing->keys) + my.base;
    const auto own = *reinterpret_cast<const Neighbours<Bits, Items>*>(keys);
    my.find_heads(own.at, keys[my.base ? -1 : 0], keys[my.base + Items < n() ? Items : 0], n());
  }
  __device__ __forceinline__ void read_pairs(Pairs& my) const {
    if constexpr (!Blocks::one) {
      const auto pairs = *reinterpret_cast<const Neighbours<std::uint32_t, Items>*>(crossing->pairs + my.base);
#pragma unroll
      for (int k = 0; k < Items; ++k) my.pair[k] = k < my.valid ? pairs.at[k] : 0;
    }
  }
  __device__ __forceinline__ void fetch(Pairs& my, std::uint32_t tile) const {
    place(my, tile);
    if constexpr (!Blocks::one) {
      crossing->wide ? read_heads<std::uint64_t>(my) : read_heads<std::uint32_t>(my);
      read_pairs(my);
#pragma unroll
      for (int k = 0; k < Items; ++k) my.c[k] = crossing->similarity[index_of(my.pair[k])];
    }
  }

  // ---- Sums over all tiles, forwards and backwards (reverse). ----

  template <class Span>
  __device__ Span* spans(bool reverse) const {
    static_assert(sizeof(Span) <= SPAN_BYTES, "see blocks.cu");
    return reinterpret_cast<Span*>(crossing->spans) + (reverse ? count() + 1 : 0);
  }
  template <bool Reverse, class Span, class Wide>
  __device__ __forceinline__ void scan_tiles() const {
    Span* const sums = spans<Span>(Reverse);
    const int tiles = static_cast<int>(count());
    Wide before;
    for (int first = 0; first < tiles; first += Block) {
      // In a chunk of Block tiles, threads follow the order of the tiles. A backward scan begins with the last chunk.
      const int t = static_cast<int>(threadIdx.x) + (Reverse ? tiles - first - Block : first);
      const bool in = t >= 0 && t < tiles;
      Wide total;
      const Wide earlier = block_exclusive<Reverse, Block>(in ? Wide(sums[t]) : Wide(), shared<Wide>(), total);
      if (in) sums[t] = Span(before + earlier);
      before = before + total;
    }
    if (threadIdx.x == 0) sums[tiles] = Span(before);
  }
  // Replace each tile's span by the sum (in type Wide) of the tiles before (after) it, and append the sum of all tiles.
  template <class Span, class Wide>
  __device__ __forceinline__ void join_tiles() const {
    sync();
    if (Blocks::index() == 0) {
      scan_tiles<false, Span, Wide>();
      scan_tiles<true, Span, Wide>();
    }
    sync();
  }
  // Return the sum of Z over all blocks.
  template <class Sum>
  __device__ __forceinline__ Both<Sum> of_all(Both<Sum> z) const {
    z = block_sum<Block>(z, shared<Both<Sum>>());
    if constexpr (!Blocks::one) {
      static_assert(sizeof(z) <= BOTH_BYTES, "see blocks.cu");
      Both<Sum>* const of_blocks = reinterpret_cast<Both<Sum>*>(crossing->joined);
      if (threadIdx.x == 0) of_blocks[Blocks::index()] = z;
      sync();
      z = {};
#pragma unroll 1
      for (unsigned b = threadIdx.x; b < Blocks::count(); b += Block) z = z + of_blocks[b];
      z = block_sum<Block>(z, shared<Both<Sum>>());
    }
    return z;
  }

  // ---- Results. ----

  __device__ void write_losses(T rank, T angle) const {
    if (Blocks::index() != 0 || threadIdx.x != 0) return;
    T* const losses = static_cast<T*>(args.losses);
    rank *= static_cast<T>(args.rank_weight), angle *= static_cast<T>(args.angle_weight);
    losses[0] = args.parts ? rank : rank + angle;
    if (args.parts) losses[1] = angle;
  }
  __device__ __forceinline__ void write_gradient(std::uint32_t pair, T rank, T angle) const {
    T* const grads = static_cast<T*>(args.grads) + index_of(pair);
    *grads = args.parts ? rank : rank + angle;
    if (args.parts) grads[args.n] = angle;
  }
  __device__ void write_nan() const {
    const std::uint32_t thread = Blocks::index() * Block + threadIdx.x, rows = args.parts ? 2 : 1;
    T* const grads = static_cast<T*>(args.grads);
    if (thread < rows) static_cast<T*>(args.losses)[thread] = T(NAN);
    for (std::int64_t i = thread; grads && i < rows * args.n; i += Blocks::count() * Block) grads[i] = T(NAN);
  }
};

}  // namespace raoe
