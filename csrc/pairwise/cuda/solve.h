// The pairwise losses of pairs in sorted order: once, for one thread block with everything in its shared memory, and for
// all blocks of a cooperative launch with arrays in the workspace.
//
// Positions are cut into tiles of Block * Items, a thread's Items being neighbours. Sums cross the tiles in three steps:
// of each tile, of the tiles before and behind it (one block), then the tiles again. A block that has one tile keeps its
// pairs in registers from step to step.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "sums.h"

namespace raoe {

constexpr int LABEL_SHIFT = 28;  // a pair is its index, and above it its label's low bits
constexpr std::uint32_t INDEX_MASK = (1u << LABEL_SHIFT) - 1;
constexpr int COLUMN_LABELS = 3;  // values that two columns of sums tell apart

// Opaque, so that the compiler does not merge the mask with an address of 64 bits.
__device__ __forceinline__ std::uint32_t index_of(std::uint32_t pair) {
  std::uint32_t index = pair & INDEX_MASK;
  asm("" : "+r"(index));
  return index;
}

template <class T>
__device__ __forceinline__ T load(const void* data, Float type, std::uint32_t i) {
  switch (type) {
    case Float::f32: return T(static_cast<const float*>(data)[i]);
    case Float::f64: return T(static_cast<const double*>(data)[i]);
    case Float::f16: return T(__half2float(static_cast<const __half*>(data)[i]));
    default: return T(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]));
  }
}

// The score as an unsigned integer of the same order; reports a NaN, wherever it then goes.
template <class Bits>
__device__ __forceinline__ Bits load_key(const void* data, Key type, std::uint32_t i, bool& nan) {
  if (type == Key::f32) {
    const float score = static_cast<const float*>(data)[i];
    nan |= is_nan(score);
    return orderable(score);
  }
  if (type == Key::f64) {
    const double score = static_cast<const double*>(data)[i];
    nan |= is_nan(score);
    return static_cast<Bits>(orderable(score));
  }
  return static_cast<Bits>(orderable(static_cast<const std::int64_t*>(data)[i]));
}

// What one reading of pair i finds: its sort key and payload, and what it says of all inputs.
template <class Bits, class T>
__device__ __forceinline__ T read_pair(const PairwiseArgs& args, std::uint32_t i, Bits& key, std::uint32_t& pair,
                                       Extent<T>& extent) {
  bool nan = false;
  key = load_key<Bits>(args.scores, args.score_type, i, nan);
  const T similarity = load<T>(args.similarity, args.similarity_type, i);
  Extent<T> own{similarity, similarity};
  pair = i;
  if (args.labels) {
    own.label_low = own.label_high = args.labels[i];
    pair |= static_cast<std::uint32_t>(own.label_low) << LABEL_SHIFT;
  }
  own.nan = nan || is_nan(similarity);
  extent = extent + own;
  return similarity;
}

// Arrays with an element a position. Whole tiles of it are written, so they are that long, and one more.
template <class T, class Index>
struct Arrays {
  T *before, *after;         // the rank objective's sums ahead of a position; from it on
  Index *first, *last;       // of its run of equal scores
  Index *run, *start;        // dense ranks only: how many runs are before its own; where each begins, and n
  // For labels by bits only.
  std::uint64_t* label;      // less the smallest
  T *term, *below, *above;   // of the angular objective: the pair's, its partners' sums
  Index* order[2];           // positions in this bit's order, and in the next one's
};

// What only several blocks need.
template <class T>
struct Crossing {
  const void* keys;            // sorted
  const std::uint32_t* pairs;  // in that order
  const T* similarity;         // in the caller's
  std::uint32_t n, tiles;
  bool wide;                   // keys have 64 bits
  unsigned char* spans;        // (2, tiles + 1) Span: of each tile forwards, backwards
  unsigned char* joined;       // (2, blocks) Sum: of Z
  unsigned char* kept;         // (2, n) Kept, where blocks have several tiles
};
constexpr std::size_t CROSSING_BYTES = 16;  // the largest Sum

// Who works together.
struct OneBlock {
  static constexpr bool one = true;
  static __device__ unsigned index() { return 0; }
  static __device__ unsigned count() { return 1; }
  static __device__ bool resident(std::uint32_t) { return true; }  // no block has two tiles
  static __device__ void sync() { __syncthreads(); }
};

// A thread's part of a tile.
template <class T, int Items>
struct Mine {
  std::uint32_t base, heads;  // heads, bit k: a run (or the end) begins at base + k
  std::uint32_t ids;          // two bits a pair: 0, 1 or 2, where columns tell labels apart
  int valid;
  std::uint32_t pair[Items];
  T c[Items], term[Items];  // of the angular objective

  __device__ void place(std::uint32_t first, std::uint32_t n) {
    base = first;
    valid = base >= n ? 0 : (n - base < Items ? static_cast<int>(n - base) : Items);
  }
  __device__ bool begins(int k) const { return heads >> k & 1; }
  __device__ bool ends(int k) const { return heads >> (k + 1) & 1; }
  __device__ bool has_id(int k, std::uint32_t bits) const { return ids >> 2 * k & bits; }
  template <class Bits>
  __device__ __forceinline__ void find_heads(const Bits (&key)[Items], Bits before, Bits behind, std::uint32_t n) {
    heads = 0;
#pragma unroll
    for (int k = 0; k <= Items; ++k) {
      const Bits previous = k ? key[k ? k - 1 : 0] : before, own = k < Items ? key[k < Items ? k : 0] : behind;
      if (own != previous) heads |= 1u << k;
    }
    // The first pair begins one; behind the last one only the end counts.
    heads |= base ? 0 : 1;
    if (base + Items >= n) heads = (heads & ((1u << valid) - 1)) | (base + valid == n ? 1u << valid : 0);
  }
};

template <class T, int Block, int Items, class Index, class Blocks>
struct Solver {
  using Pairs = Mine<T, Items>;
  template <class D>
  using Plain = Span<typename D::Part, false>;
  template <class D>
  using Segmented = Span<typename D::Part, true>;
  static constexpr int tile_pairs = Block * Items;
  static constexpr std::size_t scratch_bytes = (Block / 32 + 1) * sizeof(Span<LogSum<T>, true>);

  const PairwiseArgs& args;
  const Arrays<T, Index> at;
  const Crossing<T>* crossing;  // null for one block
  unsigned char* scratch;       // shared
  T room;                       // formulas.h, linear_room
  T middle = 0, middle_angle = 0;
  std::int64_t label_low = 0;
  std::uint64_t label_range = 0;
  bool columns = false;  // labels are told apart by columns of sums

  template <class V>
  __device__ V* shared() const { return reinterpret_cast<V*>(scratch); }
  __device__ std::uint32_t n() const { return static_cast<std::uint32_t>(args.n); }
  __device__ std::uint32_t tiles() const {
    if constexpr (Blocks::one) return 1;
    else return crossing->tiles;
  }
  template <class D>
  __device__ bool resident() const { return D::hot || Blocks::resident(tiles()); }
  // What is wanted: at compile time where it is hot.
  template <class D>
  __device__ bool ranked() const { return D::hot ? D::hot & RANK : args.rank; }
  template <class D>
  __device__ bool angled() const { return D::hot ? D::hot & ANGLE : args.angle; }
  template <class D>
  __device__ bool by_columns() const { return D::hot ? D::hot & ANGLE : columns; }
  template <class D>
  __device__ bool with_slopes() const { return D::hot || args.grads; }
  __device__ bool dense() const { return args.ties == Ties::dense; }
  // A block's tiles: f(tile).
  template <class F>
  __device__ __forceinline__ void each_tile(const F& f) const {
    for (std::uint32_t tile = Blocks::index(); tile < tiles(); tile += Blocks::count()) f(tile);
  }
  __device__ void place(Pairs& my, std::uint32_t tile) const { my.place(tile * tile_pairs + threadIdx.x * Items, n()); }
  __device__ __forceinline__ void run(const Extent<T>& extent, Pairs& my) {
    if (extent.nan) {
      const std::uint32_t thread = Blocks::index() * Block + threadIdx.x, rows = args.parts ? 2 : 1;
      T* const losses = static_cast<T*>(args.losses);
      T* const grads = static_cast<T*>(args.grads);
      if (thread < rows) losses[thread] = T(NAN);
      for (std::int64_t i = thread; grads && i < rows * args.n; i += Blocks::count() * Block) grads[i] = T(NAN);
      return;
    }
    const T low_angle = angle(extent.low), high_angle = angle(extent.high);
    middle = T(0.5) * extent.low + T(0.5) * extent.high;
    middle_angle = T(0.5) * (low_angle + high_angle);
    label_low = extent.label_low;
    label_range = static_cast<std::uint64_t>(extent.label_high) - static_cast<std::uint64_t>(extent.label_low);
    columns = args.angle && args.labels && label_range < COLUMN_LABELS;
    const T tau = static_cast<T>(args.tau);
    const T rank = args.rank ? tau * (extent.high - extent.low) : T(0);
    const T angles = args.angle ? tau * (low_angle - high_angle) : T(0);
    if constexpr (sizeof(T) == 4) {
      if (rank < room && angles < room) {
        if (args.grads && args.ties == Ties::average && Blocks::resident(tiles())) {
          if (columns) return args.rank ? solve<Linear<RANK | ANGLE>>(my) : solve<Linear<ANGLE>>(my);
          if (!args.angle) return solve<Linear<RANK>>(my);
        }
        return apart<Linear<0>>(*this, my);
      }
    }
    apart<Log<T>>(*this, my);
  }
  // Compact code for what is rare: the log domain (double knows no other), more labels, other ranks than the average, no gradient, more
  // pairs than the GPU's registers hold. Not inlined, and of copies, because what a call may reach lies in memory.
  template <class D>
  static __device__ __noinline__ void apart(Solver solver, Pairs my) { solver.template solve<D>(my); }

  // ---- The pairs of a tile: from the sorted arrays of several blocks. One block has them from its sort. ----

  template <class Bits>
  __device__ __forceinline__ void read_heads(Pairs& my) const {
    const Bits* const keys = static_cast<const Bits*>(crossing->keys) + my.base;
    const auto own = *reinterpret_cast<const Neighbours<Bits, Items>*>(keys);
    my.find_heads(own.at, keys[my.base ? -1 : 0], keys[my.base + Items < n() ? Items : 0], n());
  }
  __device__ __forceinline__ void fetch(Pairs& my, std::uint32_t tile) const {
    place(my, tile);
    if constexpr (!Blocks::one) {
      crossing->wide ? read_heads<std::uint64_t>(my) : read_heads<std::uint32_t>(my);
      const auto pairs = *reinterpret_cast<const Neighbours<std::uint32_t, Items>*>(crossing->pairs + my.base);
#pragma unroll
      for (int k = 0; k < Items; ++k) {
        my.pair[k] = pairs.at[k];
        my.c[k] = crossing->similarity[index_of(my.pair[k])];
      }
    }
  }
  template <class D>
  __device__ __forceinline__ void find_terms(Pairs& my) const {
    const T tau = D::scaled(args.tau);
    my.ids = 0;
    if (angled<D>()) {
#pragma unroll(D::hot ? Items : 1)
      for (int k = 0; k < Items; ++k) my.term[k] = D::term(D::exponent(-tau, quick_angle(my.c[k]), middle_angle));
    }
    if (my.valid < Items) {  // behind the last pair terms are infinite, and add nothing to the backward sums
#pragma unroll
      for (int k = 0; k < Items; ++k) {
        if (k >= my.valid) my.c[k] = my.term[k] = T(INFINITY);
      }
    }
    if (!by_columns<D>()) return;
#pragma unroll(D::hot ? Items : 1)
    for (int k = 0; k < Items; ++k) {
      my.ids |= (my.pair[k] - (static_cast<std::uint32_t>(label_low) << LABEL_SHIFT)) >> LABEL_SHIFT << 2 * k;
    }
  }
  // The rank objective's is quicker made than kept.
  template <class D, bool Inverse = false>
  __device__ __forceinline__ T rank_term(const Pairs& my, int k) const {
    const T exponent = D::exponent(D::scaled(args.tau), my.c[k], middle), term = D::term(Inverse ? -exponent : exponent);
    return D::hot || k < my.valid ? term : (Inverse ? D::nothing() : T(INFINITY));  // of an infinite c it is that
  }

  // ---- 1. Sums of the thread, the tile, all tiles. ----

  // A pair joins the sums: forwards exp(x) to the by_columns<D>() of smaller labels, backwards exp(y) to those of larger ones.
  template <class D, bool Reverse>
  __device__ __forceinline__ void add(Plain<D>& span, const Pairs& my, int k, T rank_term, T term) const {
    using Part = typename D::Part;
    if (ranked<D>()) span.rank = span.rank + Part(rank_term);
    if (!by_columns<D>()) return;
    if (my.has_id(k, 3) != Reverse) span.sum[0] = span.sum[0] + Part(term);
    if (my.has_id(k, 2) != Reverse) span.sum[1] = span.sum[1] + Part(term);
  }
  template <class D>
  __device__ __forceinline__ void sum_thread(const Pairs& my, Plain<D>& ahead,
                                             Plain<D>& behind) const {
    ahead = behind = Plain<D>();
#pragma unroll(D::hot ? Items : 1)
    for (int k = 0; k < Items; ++k) {
      ahead.hold(my.begins(k));
      add<D, false>(ahead, my, k, rank_term<D>(my, k), my.term[k]);
    }
    const std::uint32_t heads = my.heads & ((1u << my.valid) - 1), tails = my.heads >> 1;
    ahead.count = __popc(heads);
    ahead.edge = heads ? my.base + 32 - __clz(heads) : 0;
#pragma unroll(D::hot ? Items : 1)
    for (int k = Items - 1; with_slopes<D>() && k >= 0; --k) {
      behind.hold(my.ends(k));
      add<D, true>(behind, my, k, rank_term<D, true>(my, k), D::inverse(my.term[k]));
    }
    behind.edge = tails ? ~(my.base + __ffs(tails) - 1) : 0;
  }
  template <class D, bool Reverse, class S>
  static __device__ __forceinline__ S scan(S value, S* shared, S& total) {
    if constexpr (D::hot != 0) return block_exclusive<Reverse, Block>(value, shared, total);
    else return block_exclusive_apart<Reverse, Block>(value, shared, total);
  }
  // Of a thread becomes before (behind) a thread, within the tile. `publish`: what the tile adds goes to the others.
  // Returns how much the tile counts.
  template <class D, class Part, bool Segments>
  __device__ __forceinline__ std::uint32_t scan_tile(Span<Part, Segments>& forward, Span<Part, Segments>& backward,
                                                     std::uint32_t tile, bool publish) const {
    using S = Span<Part, Segments>;
    using Wide = Span<typename D::Sum, Segments>;
    S total, all;
    forward = scan<D, false>(forward, shared<S>(), total);
    backward = scan<D, true>(backward, shared<S>(), all);  // its edges, even without a gradient
    if (publish && threadIdx.x == 0) spans<Wide>(false)[tile] = Wide(total), spans<Wide>(true)[tile] = Wide(all);
    return total.count & S::COUNT;
  }
  template <class Wide>
  __device__ Wide* spans(bool reverse) const {
    return reinterpret_cast<Wide*>(crossing->spans) + (reverse ? tiles() + 1 : 0);
  }
  template <class D, bool Reverse, class Wide>
  static __device__ __forceinline__ void scan_tiles(Wide* sums, int tiles, Wide* shared) {
    Wide before;
    for (int first = 0; first < tiles; first += Block) {
      // The thread order stays that of the tiles: a backward scan takes its chunks from the end.
      const int t = static_cast<int>(threadIdx.x) + (Reverse ? tiles - first - Block : first);
      const bool in = t >= 0 && t < tiles;
      Wide total;
      const Wide earlier = scan<D, Reverse>(in ? sums[t] : Wide(), shared, total);
      if (in) sums[t] = before + earlier;
      before = before + total;
    }
    if (threadIdx.x == 0) sums[tiles] = before;
  }
  // Spans of tiles become those before (behind) each, and of all at the end: by one block, once.
  template <class D, class Wide>
  __device__ __forceinline__ void join_tiles() const {
    Blocks::sync();
    if (Blocks::index() == 0) {
      scan_tiles<D, false>(spans<Wide>(false), static_cast<int>(tiles()), shared<Wide>());
      scan_tiles<D, true>(spans<Wide>(true), static_cast<int>(tiles()), shared<Wide>());
    }
    Blocks::sync();
  }
  template <class Wide, class S>
  __device__ __forceinline__ void add_tiles(S& forward, S& backward, std::uint32_t tile) const {
    forward = S(spans<Wide>(false)[tile]) + forward;
    backward = S(spans<Wide>(true)[tile]) + backward;
  }

  // ---- 2. The tile again: tables for the rank objective, P and Q of the angular one. ----

  template <class V, class Element>
  static __device__ __forceinline__ void store(Element* array, const V (&values)[Items]) {
    Neighbours<Element, Items> pack;
#pragma unroll
    for (int k = 0; k < Items; ++k) pack.at[k] = static_cast<Element>(values[k]);
    *reinterpret_cast<Neighbours<Element, Items>*>(array) = pack;
  }
  template <class D>
  __device__ __forceinline__ void write_sums(Pairs& my, Plain<D> ahead, Plain<D> behind,
                                             typename D::Kept (&angular)[Items], typename D::Part& z) const {
    using Part = typename D::Part;
    T table[Items], below[Items];
    std::uint32_t edges[Items], runs[Items], run = ahead.count - 1;
#pragma unroll(D::hot ? Items : 1)
    for (int k = 0; k < Items; ++k) {
      edges[k] = k ? (my.begins(k) ? my.base + k : edges[k ? k - 1 : 0]) : (my.begins(k) ? my.base : ahead.edge - 1);
      if (!D::hot) {
        runs[k] = run += my.begins(k);
        if (dense() && my.begins(k)) at.start[run] = static_cast<Index>(my.base + k);  // n, too, where the last run ends
      }
      ahead.hold(my.begins(k));
      table[k] = D::value(ahead.rank);
      below[k] = my.has_id(k, 3) ? (my.has_id(k, 1) ? D::value(ahead.held[1]) : D::nothing()) : D::value(ahead.held[0]);
      add<D, false>(ahead, my, k, rank_term<D>(my, k), my.term[k]);
    }
    const bool closes = my.valid == Items && my.base + Items == n();
    store(at.first + my.base, edges);
    if (!D::hot && dense()) {
      if (closes) at.start[run + 1] = static_cast<Index>(n());
      store(at.run + my.base, runs);
    }
    if (ranked<D>()) store(at.before + my.base, table);
#pragma unroll(D::hot ? Items : 1)
    for (int k = Items - 1; k >= 0; --k) {
      const T y = D::inverse(my.term[k]);
      edges[k] = my.ends(k) ? my.base + k : (k + 1 < Items ? edges[k + 1 < Items ? k + 1 : k] : ~behind.edge);
      if (by_columns<D>()) z = z + Part(D::product(y, below[k]));
      if (!with_slopes<D>()) continue;
      behind.hold(my.ends(k));
      add<D, true>(behind, my, k, rank_term<D, true>(my, k), y);
      table[k] = D::value(behind.rank);
      if (!by_columns<D>()) continue;
      const T above = my.has_id(k, 2) ? D::value(behind.held[1])
                                      : (my.has_id(k, 1) ? D::value(behind.held[0]) : D::nothing());
      angular[k] = D::kept(my.term[k], below[k], above, angle_slope(my.c[k]));
    }
    store(at.last + my.base, edges);
    if (!with_slopes<D>() || !ranked<D>()) return;
    store(at.after + my.base, table);
    if (closes) at.after[n()] = D::nothing();
  }

  // ---- 2b. P and Q of the angular objective with any labels, or none: by bits. ----
  //
  // l_i > l_j holds where the two first differ, from the top, at a bit that l_i has. So at each bit: among those that
  // agree above it (a segment), the ones with the bit add to the column that those without it read. The order starts as
  // that of the scores; after each bit those without it come first, which keeps segments together and scores sorted.

  struct Entry {
    std::uint32_t position, run;
    std::uint64_t label;
  };
  __device__ Entry entry(int which, std::uint32_t q) const {
    const std::uint32_t p = at.order[which][q];
    return {p, at.first[p], at.label[p]};
  }
  // f(q, entry, whether it has the bit, whether it reads, span) along the thread's positions; the span is before
  // (behind) q. bit -1: no labels, all add and read.
  template <class D, bool Reverse, class F>
  __device__ __forceinline__ void walk(const Pairs& my, int bit, int which, Segmented<D>& span,
                                       const F& f) const {
    if (my.valid == 0) return;
    const std::uint32_t first = Reverse ? my.base + my.valid - 1 : my.base, outer = Reverse ? n() - 1 : 0;
    Entry previous{};
    if (first != outer) previous = entry(which, Reverse ? first + 1 : first - 1);
#pragma unroll 1
    for (int k = 0; k < my.valid; ++k) {
      const std::uint32_t q = Reverse ? first - k : first + k;
      const Entry own = entry(which, q);
      const bool segment = q == outer || (bit >= 0 && own.label >> bit >> 1 != previous.label >> bit >> 1);
      if (segment) span.begin_segment();
      if (segment || own.run != previous.run) span.begin_run();
      const bool one = bit >= 0 && (own.label >> bit & 1);
      f(q, own, one, bit < 0 || one == Reverse, span);
      if (bit < 0 || one != Reverse) {
        const T term = at.term[own.position];
        span.sum[0] = span.sum[0] + typename D::Part(Reverse ? D::inverse(term) : term);
      }
      span.count += !one;
      previous = own;
    }
  }
  template <class D>
  __device__ __forceinline__ void by_bits() const {
    using Wide = Span<typename D::Sum, true>;
    using Part = Segmented<D>;
    int bit = -1, which = 0;
    if (args.labels) while (bit < 63 && label_range >> (bit + 1)) ++bit;
    for (bool more = true; more; more = --bit >= 0, which ^= 1) {
      Pairs my;
      Part ahead, behind;
      std::uint32_t zeros = 0;
      const auto sum = [&](std::uint32_t tile, bool publish) {
        const auto ignore = [](std::uint32_t, const Entry&, bool, bool, const Part&) {};
        place(my, tile);
        ahead = behind = Part();
        walk<D, false>(my, bit, which, ahead, ignore);
        if (with_slopes<D>()) walk<D, true>(my, bit, which, behind, ignore);
        zeros = scan_tile<D>(ahead, behind, tile, publish);
      };
      each_tile([&](std::uint32_t tile) { sum(tile, tiles() > 1); });
      if (tiles() > 1) join_tiles<D, Wide>();
      each_tile([&](std::uint32_t tile) {
        if (!resident<D>()) sum(tile, false);
        if (tiles() > 1) {
          add_tiles<Wide>(ahead, behind, tile);
          zeros = spans<Wide>(false)[tiles()].count & Wide::COUNT;
        }
        walk<D, false>(my, bit, which, ahead, [&](std::uint32_t q, const Entry& own, bool one, bool reads,
                                                  const Part& span) {
          T& below = at.below[own.position];
          if (reads) below = D::plus(below, D::value(span.held[0]));
          const std::uint32_t before = span.count & Part::COUNT;
          at.order[which ^ 1][one ? zeros + (q - before) : before] = static_cast<Index>(own.position);
        });
        if (with_slopes<D>()) {
          walk<D, true>(my, bit, which, behind, [&](std::uint32_t, const Entry& own, bool, bool reads,
                                                    const Part& span) {
            T& above = at.above[own.position];
            if (reads) above = D::plus(above, D::value(span.held[0]));
          });
        }
      });
      Blocks::sync();
    }
  }
  template <class D>
  __device__ __forceinline__ void prepare_bits(const Pairs& my) const {
#pragma unroll(D::hot ? Items : 1)
    for (int k = 0; k < Items; ++k) {
      const std::uint32_t p = my.base + k;
      if (k >= my.valid) continue;
      at.term[p] = my.term[k];
      at.below[p] = at.above[p] = D::nothing();
      at.order[0][p] = static_cast<Index>(p);
      at.label[p] = 0;
      if (args.labels) at.label[p] = static_cast<std::uint64_t>(args.labels[index_of(my.pair[k])] - label_low);
    }
  }
  template <class D>
  __device__ __forceinline__ void take_bits(const Pairs& my, typename D::Kept (&kept)[Items],
                                            typename D::Part& z) const {
#pragma unroll(D::hot ? Items : 1)
    for (int k = 0; k < Items; ++k) {
      if (k >= my.valid) continue;
      const T below = at.below[my.base + k];
      z = z + typename D::Part(D::product(D::inverse(my.term[k]), below));
      if (with_slopes<D>()) kept[k] = D::kept(my.term[k], below, at.above[my.base + k], angle_slope(my.c[k]));
    }
  }

  // ---- 3. Partners of the rank objective: a prefix and a suffix of the order. ----

  template <bool Dense>
  __device__ __forceinline__ int partners_end(Ties ties, int rank, int threshold) const {
    const int bound = rank - threshold, m = prefix_probe(bound < 0 ? 0 : bound);
    const int end = Dense ? int(at.start[m + 1]) : prefix_end(ties, bound, int(at.first[m]), int(at.last[m]));
    return bound < 0 ? 0 : end;
  }
  template <bool Dense>
  __device__ __forceinline__ int partners_start(Ties ties, int rank, int threshold, int limit) const {
    const int bound = rank + threshold, m = suffix_probe(bound), probe = m < limit ? m : limit - 1;
    const int start = Dense ? int(at.start[probe]) : suffix_start(ties, bound, int(at.first[probe]), int(at.last[probe]));
    return m < limit ? start : static_cast<int>(n());
  }
  template <class D, bool Dense>
  __device__ __forceinline__ void look_up(const Pairs& my, typename D::Kept (&kept)[Items], typename D::Part& z) const {
    const Ties ties = D::hot ? Ties::average : args.ties;
    // Beyond 2 n it is the same: no partner.
    const int threshold = static_cast<int>(args.threshold < 2 * args.n ? args.threshold : 2 * args.n);
    const int limit = Dense ? at.run[n() - 1] + 1 : n();
#pragma unroll(D::hot ? Items : 1)
    for (int k = 0; k < Items; ++k) {
      const int p = k < my.valid ? my.base + k : 0;  // an infinite term adds nothing
      if (!D::hot && k >= my.valid) break;
      const int rank = Dense ? 2 * int(at.run[p]) : doubled_rank(ties, p, int(at.first[p]), int(at.last[p]), 0);
      const T below = at.before[partners_end<Dense>(ties, rank, threshold)], x = rank_term<D>(my, k);
      z = z + typename D::Part(D::product(D::inverse(x), below));
      if (!with_slopes<D>()) continue;
      kept[k] = D::kept(x, below, at.after[partners_start<Dense>(ties, rank, threshold, limit)], T(1));
    }
  }

  // ---- All of it. ----

  // What is kept between steps where a block has several tiles.
  template <class D, class Move>
  __device__ __forceinline__ void keep(const Pairs& my, int row, const Move& move) const {
    auto* const kept = reinterpret_cast<typename D::Kept*>(crossing->kept) + row * args.n + my.base;
#pragma unroll(D::hot ? Items : 1)
    for (int k = 0; k < Items; ++k) {
      if (k < my.valid) move(kept[k], k);
    }
  }

  template <class D>
  __device__ __forceinline__ void solve(Pairs& my) const {
    using Sum = typename D::Sum;
    using Part = typename D::Part;
    using Kept = typename D::Kept;
    Kept rank[Items], angular[Items];
    Plain<D> forward, backward;
    Sum z[2] = {Sum(), Sum()};
    const bool bits = !D::hot && angled<D>() && !columns;
    const auto sum = [&](std::uint32_t tile, bool publish) {
      fetch(my, tile);
      find_terms<D>(my);
      sum_thread<D>(my, forward, backward);
      scan_tile<D>(forward, backward, tile, publish);
    };
    each_tile([&](std::uint32_t tile) { sum(tile, tiles() > 1); });
    if (tiles() > 1) join_tiles<D, Span<Sum, false>>();
    each_tile([&](std::uint32_t tile) {
      if (!resident<D>()) sum(tile, false);
      if (tiles() > 1) add_tiles<Span<Sum, false>>(forward, backward, tile);
      Part part = Part();
      write_sums<D>(my, forward, backward, angular, part);
      z[1] = z[1] + Sum(part);
      if (!resident<D>() && by_columns<D>() && with_slopes<D>()) keep<D>(my, 1, [&](Kept& kept, int k) { kept = angular[k]; });
      if (bits) prepare_bits<D>(my);
    });
    Blocks::sync();
    if (bits) by_bits<D>();
    each_tile([&](std::uint32_t tile) {
      if (!resident<D>()) {
        fetch(my, tile);
        find_terms<D>(my);
      }
      Part first = Part(), second = Part();
      if (ranked<D>()) !D::hot && dense() ? look_up<D, true>(my, rank, first) : look_up<D, false>(my, rank, first);
      if (bits) take_bits<D>(my, angular, second);
      z[0] = z[0] + Sum(first), z[1] = z[1] + Sum(second);
      if (resident<D>() || !with_slopes<D>()) return;
      if (ranked<D>()) keep<D>(my, 0, [&](Kept& kept, int k) { kept = rank[k]; });
      if (bits) keep<D>(my, 1, [&](Kept& kept, int k) { kept = angular[k]; });
    });
    for (Sum& part : z) part = block_sum<Block>(part, shared<Sum>());
    if constexpr (!Blocks::one) sum_blocks(z[0], z[1]);
    const typename D::Closed closed[2] = {D::close(z[0]), D::close(z[1])};
    if (Blocks::index() == 0 && threadIdx.x == 0) {
      T* const losses = static_cast<T*>(args.losses);
      const T first = ranked<D>() ? static_cast<T>(args.rank_weight) * D::loss(z[0]) : T(0);
      const T second = angled<D>() ? static_cast<T>(args.angle_weight) * D::loss(z[1]) : T(0);
      losses[0] = args.parts ? first : first + second;
      if (args.parts) losses[1] = second;
    }
    if (!with_slopes<D>()) return;
    T* const grads = static_cast<T*>(args.grads);
    const T rank_weight = static_cast<T>(args.tau * args.rank_weight);
    const T angle_weight = static_cast<T>(args.tau * args.angle_weight);
    each_tile([&](std::uint32_t tile) {
      if (!resident<D>()) {
        place(my, tile);
#pragma unroll
        for (int k = 0; k < Items; ++k) my.pair[k] = k < my.valid ? crossing->pairs[my.base + k] : 0;
        if (ranked<D>()) keep<D>(my, 0, [&](Kept& kept, int k) { rank[k] = kept; });
        if (angled<D>()) keep<D>(my, 1, [&](Kept& kept, int k) { angular[k] = kept; });
      }
#pragma unroll(D::hot ? Items : 1)
      for (int k = 0; k < Items; ++k) {
        if (k >= my.valid) continue;
        const std::uint32_t i = index_of(my.pair[k]);
        const T first = ranked<D>() ? D::gradient(rank[k], closed[0], rank_weight) : T(0);
        const T second = angled<D>() ? D::gradient(angular[k], closed[1], angle_weight) : T(0);
        grads[i] = args.parts ? first : first + second;
        if (args.parts) grads[args.n + i] = second;
      }
    });
  }
  // Z of a block becomes that of all.
  template <class Sum>
  __device__ __forceinline__ void sum_blocks(Sum& rank, Sum& angular) const {
    Sum* const of_blocks = reinterpret_cast<Sum*>(crossing->joined);
    if (threadIdx.x == 0) of_blocks[Blocks::index()] = rank, of_blocks[Blocks::count() + Blocks::index()] = angular;
    Blocks::sync();
    rank = angular = Sum();
    for (unsigned b = threadIdx.x; b < Blocks::count(); b += Block) {
      rank = rank + of_blocks[b];
      angular = angular + of_blocks[Blocks::count() + b];
    }
    rank = block_sum<Block>(rank, shared<Sum>());
    angular = block_sum<Block>(angular, shared<Sum>());
  }
};

}  // namespace raoe
