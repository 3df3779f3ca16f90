// The pairwise losses of pairs in sorted order, for a single thread block with arrays in shared memory, or for all
// blocks of a cooperative launch with arrays in the workspace.
//
// Positions are cut into tiles of Block * Items; a thread has Items consecutive positions. Sums over all tiles take
// three steps: sum each tile, sum the tiles before and after each (one block), and process each tile again. A block
// with a single tile keeps its pairs in registers between the steps.
#pragma once

#include "pairs.h"

namespace raoe {

template <class T, int Block, int Items, class Index, class Blocks>
struct Solver {
  using Pairs = ThreadTile<T, Items>;
  template <class D>
  using Plain = Span<typename D::Part, false>;
  template <class D>
  using Segmented = Span<typename D::Part, true>;
  static constexpr int tile_pairs = Block * Items;
  static constexpr int warps = Block / 32;
  static constexpr std::size_t scratch_bytes = (warps + 1) * sizeof(Span<LogSum<T>, true>) + warps * 16;

  const PairwiseArgs& args;
  const Arrays<T, Index> at;
  const Crossing<T>* crossing;  // null for one block
  unsigned char* scratch;       // shared memory
  T room;                       // see linear_room in formulas.h
  T middle = 0, middle_angle = 0;
  std::int64_t label_low = 0;
  std::uint64_t label_range = 0;
  bool columns = false;  // labels are few enough to use columns of sums

  template <class V>
  __device__ V* shared() const { return reinterpret_cast<V*>(scratch); }
  __device__ std::uint32_t n() const { return static_cast<std::uint32_t>(args.n); }
  __device__ std::uint32_t tiles() const {
    if constexpr (Blocks::one) return 1;
    else return crossing->tiles;
  }
  template <class D>
  __device__ bool resident() const { return D::hot || Blocks::resident(tiles()); }
  // The objectives and results to compute, known at compile time in hot code.
  template <class D>
  __device__ bool ranked() const { return D::hot ? D::hot & RANK : args.rank; }
  template <class D>
  __device__ bool angled() const { return D::hot ? D::hot & ANGLE : args.angle; }
  template <class D>
  __device__ bool by_columns() const { return D::hot ? D::hot & ANGLE : columns; }
  template <class D>
  __device__ bool with_slopes() const { return D::hot || args.grads; }
  __device__ void sync() const {
    if constexpr (Blocks::one) __syncthreads();
    else Blocks::sync(crossing->arrived);
  }
  __device__ bool dense() const { return args.ties == Ties::dense; }
  // Calls f(tile) for each tile of the block. Hot code has one tile per block.
  template <class D, class F>
  __device__ __forceinline__ void each_tile(const F& f) const {
    if constexpr (D::hot != 0) {
      f(Blocks::index());
    } else {
      for (std::uint32_t tile = Blocks::index(); tile < tiles(); tile += Blocks::count()) f(tile);
    }
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
      if (rank < room && angles < room && tau < T(1e9)) {  // the square of a larger tau could overflow
        if (args.grads && args.ties == Ties::average && Blocks::resident(tiles())) {
          if (columns) return args.rank ? solve<Linear<RANK | ANGLE>>(my) : solve<Linear<ANGLE>>(my);
          if (!args.angle) return solve<Linear<RANK>>(my);
        }
        return out_of_line<Linear<0>>(*this, my);
      }
    }
    out_of_line<Log<T>>(*this, my);
  }
  // Compact code for rare cases: the log domain (the only one for double), more labels, tie rules other than average, no
  // gradient, more pairs than fit the GPU's registers. Not inlined; by value, as references keep variables in memory.
  template <class D>
  static __device__ __noinline__ void out_of_line(Solver solver, Pairs my) { solver.template solve<D>(my); }

  // ---- The pairs of a tile, from the sorted arrays of several blocks. A single block has them from its sort. ----

  template <class Bits>
  __device__ __forceinline__ void read_heads(Pairs& my) const {
    const Bits* const keys = static_cast<const Bits*>(crossing->keys) + my.base;
    const auto own = *reinterpret_cast<const Neighbours<Bits, Items>*>(keys);
    my.find_heads(own.at, keys[my.base ? -1 : 0], keys[my.base + Items < n() ? Items : 0], n());
  }
  // Pairs are read again later, which is cheaper than keeping them.
  __device__ __forceinline__ void read_pairs(Pairs& my) const {
    if constexpr (!Blocks::one) {
      const auto pairs = *reinterpret_cast<const Neighbours<std::uint32_t, Items>*>(crossing->pairs + my.base);
#pragma unroll
      for (int k = 0; k < Items; ++k) my.pair[k] = pairs.at[k];
    }
  }
  __device__ __forceinline__ void fetch(Pairs& my, std::uint32_t tile) const {
    place(my, tile);
    if constexpr (!Blocks::one) {
      crossing->wide ? read_heads<std::uint64_t>(my) : read_heads<std::uint32_t>(my);
      read_pairs(my);
#pragma unroll
      for (int k = 0; k < Items; ++k) {
        my.c[k] = crossing->similarity[index_of(my.pair[k])];
      }
    }
  }
  template <class D>
  __device__ __forceinline__ void find_terms(Pairs& my) const {
    const T tau = D::scaled(args.tau);
    if (by_columns<D>()) my.find_labels(static_cast<std::uint32_t>(label_low));
#pragma unroll(D::hot ? Items : 1)
    for (int k = 0; k < Items; ++k) {
      if (angled<D>()) D::angle_terms(my.c[k], tau, middle_angle, my.term[k], my.slope[k]);
      my.c[k] = D::exponent(tau, my.c[k], middle);
    }
    if (my.valid < Items) {  // positions after the last pair must add nothing to the backward sums
#pragma unroll
      for (int k = 0; k < Items; ++k) Bit{~my.inside_bits, 1u << k}.move(my.c[k], T(INFINITY));
    }
  }
  // The rank objective's term: computing it again is cheaper than keeping it.
  template <class D, bool Inverse = false>
  __device__ __forceinline__ T rank_term(const Pairs& my, int k) const {
    const T term = D::term(Inverse ? -my.c[k] : my.c[k]);
    return D::hot || k < my.valid ? term : (Inverse ? D::nothing() : T(INFINITY));  // hot: c is already infinite there
  }

  // ---- 1. Sums of the thread, the tile and all tiles. ----

  // Add a pair to the sums, and return the sum over labels that it reads.
  template <class D, bool Reverse>
  __device__ __forceinline__ typename D::Part add(Plain<D>& span, const Pairs& my, int k, T rank_term, T term,
                                                  std::uint32_t& edge) const {
    using Part = typename D::Part;
    if (ranked<D>()) span.rank = span.rank + Part(rank_term);
    const Bit begins = Reverse ? my.ends(k) : my.begins(k);
    const std::uint32_t place = my.base + k + Reverse;
    if (by_columns<D>()) return join<Reverse>(span, Part(term), begins, my.not_0(k), my.is_2(k), edge, place);
    begins.move(edge, place);
    return Part();
  }
  template <class D>
  __device__ __forceinline__ void sum_thread(const Pairs& my, Plain<D>& ahead,
                                             Plain<D>& behind) const {
    ahead = behind = Plain<D>();
#pragma unroll(D::hot ? Items : 1)
    for (int k = 0; k < Items; ++k) {
      std::uint32_t edge = 0;
      add<D, false>(ahead, my, k, rank_term<D>(my, k), my.term[k], edge);
    }
    ahead.count = __popc(my.heads);
    ahead.edge = my.heads ? my.base + 32 - __clz(my.heads) : 0;
#pragma unroll(D::hot ? Items : 1)
    for (int k = Items - 1; with_slopes<D>() && k >= 0; --k) {
      std::uint32_t edge = 0;
      add<D, true>(behind, my, k, rank_term<D, true>(my, k), D::inverse(my.term[k]), edge);
    }
    behind.edge = my.tails ? ~(my.base + __ffs(my.tails) - 1) : 0;
  }
  template <class D, bool Reverse, class S>
  static __device__ __forceinline__ S scan(S value, S* shared, S& total) {
    if constexpr (D::hot != 0) return block_exclusive<Reverse, Block>(value, shared, total);
    else return block_exclusive_call<Reverse, Block>(value, shared, total);
  }
  // Replace each thread's span by the sum before (after) the thread in its tile. `publish`: store the tile's sum for the
  // other tiles. Returns the tile's count.
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
  // The same for hot code, whose spans hold few numbers, with a single barrier.
  template <class D>
  __device__ __forceinline__ void scan_hot(Plain<D>& forward, Plain<D>& backward, std::uint32_t tile, bool publish) const {
    using S = Plain<D>;
    constexpr bool ranked = D::hot & RANK, columns = D::hot & ANGLE;
    const int lane = threadIdx.x & 31;
    S *const ahead = shared<S>(), *const behind = ahead + warps;
    const S own = forward, own_behind = backward;
    forward = warp_exclusive<false, ranked, columns>(own, lane, ahead);
    backward = warp_exclusive<true, ranked, columns>(own_behind, lane, behind);
    __syncthreads();
    if constexpr (warps > 4) scan_warps<false, warps>(ahead, 0), scan_warps<true, warps>(behind, 1), __syncthreads();
    forward = earlier_warps<false, warps>(ahead) + forward;
    backward = earlier_warps<true, warps>(behind) + backward;
    if (publish && threadIdx.x == Block - 1) spans<S>(false)[tile] = forward + own;
    if (publish && threadIdx.x == 0) spans<S>(true)[tile] = backward + own_behind;
  }
  template <class Wide>
  __device__ Wide* spans(bool reverse) const {
    return reinterpret_cast<Wide*>(crossing->spans) + (reverse ? tiles() + 1 : 0);
  }
  template <class D, bool Reverse, class Wide, class Kept>
  static __device__ __forceinline__ void scan_tiles(Kept* sums, int tiles, Wide* shared) {
    Wide before;
    for (int first = 0; first < tiles; first += Block) {
      // Threads keep the order of the tiles; a backward scan takes its chunks from the end.
      const int t = static_cast<int>(threadIdx.x) + (Reverse ? tiles - first - Block : first);
      const bool in = t >= 0 && t < tiles;
      Wide total;
      const Wide earlier = scan<D, Reverse>(in ? Wide(sums[t]) : Wide(), shared, total);
      if (in) sums[t] = Kept(before + earlier);
      before = before + total;
    }
    if (threadIdx.x == 0) sums[tiles] = Kept(before);
  }
  // One block replaces each tile's span by the sum before (after) the tile, and appends the sum over all tiles.
  template <class D, class Wide, class Kept>
  __device__ __forceinline__ void join_tiles() const {
    sync();
    if (Blocks::index() == 0) {
      scan_tiles<D, false>(spans<Kept>(false), static_cast<int>(tiles()), shared<Wide>());
      scan_tiles<D, true>(spans<Kept>(true), static_cast<int>(tiles()), shared<Wide>());
    }
    sync();
  }
  template <class Kept, class S>
  __device__ __forceinline__ void add_tiles(S& forward, S& backward, std::uint32_t tile) const {
    forward = S(spans<Kept>(false)[tile]) + forward;
    backward = S(spans<Kept>(true)[tile]) + backward;
  }

  // ---- 2. Each tile again: tables for the rank objective, P and Q of the angular one. ----

  // Store 16 bytes once all are known, in a loop that runs forwards (Step 1) or backwards (-1). Each: elements per pair.
  template <int Step, int Each = 1, class V, class Element, int Count>
  __device__ __forceinline__ void store(Element* array, const Pairs& my, int k, const V (&values)[Count]) const {
    constexpr int most = 16 / (sizeof(Element) * Each), pack = Items < most ? Items : most;
    if (k % pack != (Step == 1 ? pack - 1 : 0)) return;
    Neighbours<Element, pack * Each> out;
    const int first = k / pack * pack * Each;
#pragma unroll
    for (int i = 0; i < pack * Each; ++i) out.at[i] = static_cast<Element>(values[first + i]);
    *reinterpret_cast<Neighbours<Element, pack * Each>*>(array + Each * my.base + first) = out;
  }
  // For dense ranks, `ends` is indexed by twice the run's index; for other ranks by twice the position.
  template <class D>
  __device__ __forceinline__ void write_ends(const Pairs& my, const Index (&runs)[Items]) const {
    if (my.base == 0) at.ends[-1] = 0;
    for (int k = 0; !D::hot && dense() && k < my.valid; ++k) {
      if (my.ends(k)) at.ends[2 * runs[k]] = at.ends[2 * runs[k] + 1] = static_cast<Index>(my.base + k + 1);
    }
  }
  template <class D>
  __device__ __forceinline__ void write_sums(Pairs& my, Plain<D> ahead, Plain<D> behind,
                                             typename D::Kept (&angular)[Items], typename D::Part& z) const {
    using Part = typename D::Part;
    T table[Items], below[Items];
    std::uint32_t first[Items], edge = ahead.edge - 1;
    Index runs[Items], ranks[Items];
    std::uint32_t run = ahead.count - 1;
#pragma unroll(D::hot ? Items : 1)
    for (int k = 0; k < Items; ++k) {
      table[k] = D::value(ahead.rank);
      below[k] = D::value(add<D, false>(ahead, my, k, rank_term<D>(my, k), my.term[k], edge));
      first[k] = edge;
      if (!D::hot) runs[k] = static_cast<Index>(run += bool(my.begins(k)));
      if (ranked<D>()) store<1>(at.before, my, k, table);
      if (!D::hot) store<1>(at.run, my, k, runs);
    }
    edge = ~behind.edge < n() ? ~behind.edge + 1 : n();
    const int twice = 2 * my.base;
    std::uint32_t ends[2 * Items];
#pragma unroll(D::hot ? Items : 1)
    for (int k = Items - 1; k >= 0; --k) {
      const T y = D::inverse(my.term[k]);
      const auto above = add<D, true>(behind, my, k, rank_term<D, true>(my, k), y, edge);
      if (ranked<D>()) {
        const bool alone = !D::hot && args.ties == Ties::ordinal;
        const int begin = alone ? my.base + k : first[k], end = alone ? my.base + k + 1 : edge;
        // Twice the rank minus twice the base.
        const int rank = doubled_rank(D::hot ? Ties::average : args.ties, begin, begin, end - 1, D::hot ? 0 : int(runs[k])) - twice;
        ends[2 * k] = rank <= 2 * k ? end : begin;
        ends[2 * k + 1] = rank <= 2 * k + 1 ? end : begin;
        my.rank[D::hot ? k : 0] = rank;
        ranks[k] = static_cast<Index>(rank + twice);
        if (!D::hot) store<-1>(at.rank, my, k, ranks);
        if (D::hot || !dense()) store<-1, 2>(at.ends, my, k, ends);
      }
      if (by_columns<D>()) z = z + Part(D::product(y, below[k]));
      if (!with_slopes<D>()) continue;
      table[k] = D::value(behind.rank);
      if (ranked<D>()) store<-1>(at.after, my, k, table);
      if (!by_columns<D>()) continue;
      angular[k] = D::kept(my.term[k], below[k], D::value(above), my.slope[k]);
    }
    if (!ranked<D>()) return;
    write_ends<D>(my, runs);
    if (!with_slopes<D>()) return;
    if (my.base + Items == n()) at.after[n()] = D::nothing();
  }
  // ---- 2b. P and Q of the angular objective with any labels, or without labels: bit by bit. ----
  //
  // l_i > l_j exactly if l_i has a 1 at the highest bit where the two differ. So for each bit: among pairs that agree in
  // all higher bits (a segment), those with the bit add to the column that those without it read. The order starts as
  // that of the scores; after each bit, pairs without it move first, which keeps segments together and scores sorted.

  struct Entry {
    std::uint32_t position, run;
    std::uint64_t label;
  };
  __device__ Entry entry(int which, std::uint32_t q) const {
    const std::uint32_t p = at.order[which][q];
    return {p, at.run[p], at.label[p]};
  }
  // Calls f(q, entry, whether it has the bit, whether it reads, span) along the thread's positions, with the span before
  // (after) q. bit = -1: there are no labels, and all pairs add and read.
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
      each_tile<D>([&](std::uint32_t tile) { sum(tile, tiles() > 1); });
      if (tiles() > 1) join_tiles<D, Wide, Wide>();
      each_tile<D>([&](std::uint32_t tile) {
        if (!resident<D>()) sum(tile, false);
        if (tiles() > 1) {
          add_tiles<Wide>(ahead, behind, tile);
          zeros = spans<Wide>(false)[tiles()].count & Wide::COUNT;
        }
        walk<D, false>(my, bit, which, ahead, [&](std::uint32_t q, const Entry& own, bool one, bool reads,
                                                  const Part& span) {
          T& below = at.below[own.position];
          if (reads) below = D::plus(below, D::value(span.retained[0]));
          const std::uint32_t before = span.count & Part::COUNT;
          at.order[which ^ 1][one ? zeros + (q - before) : before] = static_cast<Index>(own.position);
        });
        if (with_slopes<D>()) {
          walk<D, true>(my, bit, which, behind, [&](std::uint32_t, const Entry& own, bool, bool reads,
                                                    const Part& span) {
            T& above = at.above[own.position];
            if (reads) above = D::plus(above, D::value(span.retained[0]));
          });
        }
      });
      sync();
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
      if (!args.labels) continue;
      // Unsigned, because the difference of two labels may not fit int64.
      at.label[p] = static_cast<std::uint64_t>(args.labels[index_of(my.pair[k])]) - static_cast<std::uint64_t>(label_low);
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
      if (with_slopes<D>()) kept[k] = D::kept(my.term[k], below, at.above[my.base + k], my.slope[k]);
    }
  }

  // ---- 3. Partners in the rank objective: a prefix and a suffix of the order. ----

  template <class D>
  __device__ __forceinline__ void look_up(const Pairs& my, typename D::Kept (&kept)[Items], typename D::Part& z) const {
    // Any threshold of 2 n or more means that there are no partners.
    const int threshold = static_cast<int>(args.threshold < 2 * args.n ? args.threshold : 2 * args.n);
    const int own = D::hot ? 2 * my.base : 0, down = own - threshold, up = own + threshold - 1;
    const int limit = 2 * (!D::hot && dense() ? at.run[n() - 1] + 1 : n()) - 1;
#pragma unroll(D::hot ? Items : 1)
    for (int k = 0; k < Items; ++k) {
      if (!D::hot && k >= my.valid) break;
      const int rank = D::hot ? my.rank[k] : int(at.rank[my.base + k]);
      const T below = at.before[at.ends[rank + down < -1 ? -1 : rank + down]], x = rank_term<D>(my, k);
      z = z + typename D::Part(D::product(D::inverse(x), below));
      if (!with_slopes<D>()) continue;
      kept[k] = D::kept(x, below, at.after[at.ends[rank + up < limit ? rank + up : limit]], D::rank_factor());
    }
  }

  // ---- All steps. ----

  // Data kept in memory between the steps if a block has several tiles.
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
    using Z = Both<std::conditional_t<D::hot != 0, Part, Sum>>;  // hot code sums a single tile
    Z z;
    const bool bits = !D::hot && angled<D>() && !columns;
    const auto sum = [&](std::uint32_t tile, bool publish) {
      fetch(my, tile);
      find_terms<D>(my);
      sum_thread<D>(my, forward, backward);
      if constexpr (D::hot != 0) scan_hot<D>(forward, backward, tile, publish);
      else scan_tile<D>(forward, backward, tile, publish);
    };
    each_tile<D>([&](std::uint32_t tile) { sum(tile, tiles() > 1); });
    using Wide = Span<Sum, false>;
    using OfTiles = std::conditional_t<D::hot != 0, Plain<D>, Wide>;
    if (tiles() > 1) join_tiles<D, Wide, OfTiles>();
    each_tile<D>([&](std::uint32_t tile) {
      if (!resident<D>()) sum(tile, false);
      if (tiles() > 1) add_tiles<OfTiles>(forward, backward, tile);
      Part part = Part();
      write_sums<D>(my, forward, backward, angular, part);
      z.angle = z.angle + part;
      if (!resident<D>() && by_columns<D>() && with_slopes<D>()) keep<D>(my, 1, [&](Kept& kept, int k) { kept = angular[k]; });
      if (bits) prepare_bits<D>(my);
    });
    sync();
    if (bits) by_bits<D>();
    each_tile<D>([&](std::uint32_t tile) {
      if (!resident<D>()) {
        fetch(my, tile);
        find_terms<D>(my);
      }
      Part first = Part(), second = Part();
      if (ranked<D>()) look_up<D>(my, rank, first);
      if (bits) take_bits<D>(my, angular, second);
      z.rank = z.rank + first, z.angle = z.angle + second;
      if (resident<D>() || !with_slopes<D>()) return;
      if (ranked<D>()) keep<D>(my, 0, [&](Kept& kept, int k) { kept = rank[k]; });
      if (bits) keep<D>(my, 1, [&](Kept& kept, int k) { kept = angular[k]; });
    });
    const Both<Sum> all = of_all(Both<Sum>(block_sum<Block>(z, shared<Z>())));
    const typename D::Closed closed[2] = {D::close(all.rank), D::close(all.angle)};
    if (Blocks::index() == 0 && threadIdx.x == 0) {
      T* const losses = static_cast<T*>(args.losses);
      const T first = ranked<D>() ? static_cast<T>(args.rank_weight) * D::loss(all.rank) : T(0);
      const T second = angled<D>() ? static_cast<T>(args.angle_weight) * D::loss(all.angle) : T(0);
      losses[0] = args.parts ? first : first + second;
      if (args.parts) losses[1] = second;
    }
    if (!with_slopes<D>()) return;
    T* grads = static_cast<T*>(args.grads);
    const T rank_weight = static_cast<T>(args.tau * args.rank_weight);
    const T angle_weight = D::angle_weight(args.tau, args.angle_weight), added = args.parts ? T(0) : angle_weight;
    T* grads_of_angle = grads + args.n;
    hide_origin(grads), hide_origin(grads_of_angle);
    each_tile<D>([&](std::uint32_t tile) {
      place(my, tile);
      if (!resident<D>()) {
#pragma unroll
        for (int k = 0; k < Items; ++k) my.pair[k] = k < my.valid ? crossing->pairs[my.base + k] : 0;
        if (ranked<D>()) keep<D>(my, 0, [&](Kept& kept, int k) { rank[k] = kept; });
        if (angled<D>()) keep<D>(my, 1, [&](Kept& kept, int k) { angular[k] = kept; });
      }
      if (resident<D>()) read_pairs(my);
#pragma unroll(D::hot ? Items : 1)
      for (int k = 0; k < Items; ++k) {
        const std::uint32_t i = index_of(my.pair[k]);
        const T first = ranked<D>() ? D::gradient(rank[k], closed[0], rank_weight) : T(0);
        const T second = angled<D>() ? D::gradient(angular[k], closed[1], added) : T(0);
        my.inside(k).store(grads + i, first + second);
      }
      if (!args.parts) return;
#pragma unroll(D::hot ? Items : 1)
      for (int k = 0; k < Items; ++k) {
        const T alone = angled<D>() ? D::gradient(angular[k], closed[1], angle_weight) : T(0);
        my.inside(k).store(grads_of_angle + index_of(my.pair[k]), alone);
      }
    });
  }
  // Return the sum of Z over all blocks.
  template <class Sums>
  __device__ __forceinline__ Sums of_all(Sums z) const {
    if constexpr (!Blocks::one) {
      Sums* const of_blocks = reinterpret_cast<Sums*>(crossing->joined);
      if (threadIdx.x == 0) of_blocks[Blocks::index()] = z;
      sync();
      z = Sums();
      #pragma unroll 1
      for (unsigned b = threadIdx.x; b < Blocks::count(); b += Block) z = z + of_blocks[b];
      z = block_sum<Block>(z, shared<Sums>());
    }
    return z;
  }
};

}  // namespace raoe
