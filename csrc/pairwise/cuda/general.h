// The pairwise losses in all cases that hot.h does not handle: float64, large exponents, other tie rules, no labels or
// other labels, more pairs than fit into the GPU's registers. Sums are logarithms. Arrays are in memory.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace raoe {

// Represents the number sum * exp(max), whose logarithm stays in range even if the number does not.
template <class T>
struct LogSum {
  T max = T(-INFINITY), sum = T(0);
  LogSum() = default;
  __device__ explicit LogSum(T exponent) : max(exponent), sum(exponent == T(-INFINITY) ? T(0) : T(1)) {}
  __device__ T log() const { return max + std::log(sum); }
};
// Not inlined: compilers take minutes for an inlined scan of LogSum.
template <class T>
__device__ __noinline__ LogSum<T> operator+(LogSum<T> a, LogSum<T> b) {
  if (a.max < b.max) {
    const LogSum<T> larger = b;
    b = a;
    a = larger;
  }
  if (b.max == T(-INFINITY)) return a;  // -inf - -inf would be NaN
  a.sum += b.sum * std::exp(b.max - a.max);
  return a;
}

// Partial sums of a range of positions, in one direction. `sum` restarts where a segment begins. `retained` is
// `sum` at the start of the range's last run; the pairs of that run read it, because equal scores are not partners.
template <class T>
struct Segments {
  LogSum<T> sum, retained;
  std::uint32_t count = 0;               // number of runs, or of pairs whose bit is 0
  std::uint32_t edge = 0;                // 1 + start of the last run (backwards: ~ its end), or 0 for no run
  std::uint32_t segment = 0, afresh = 0;  // whether a segment begins in this range; whether before `retained`

  __device__ void begin_segment() { sum = LogSum<T>(), segment = 1; }
  __device__ void begin_run(std::uint32_t place) { retained = sum, edge = place, afresh = segment; }
};
// Join span a with span b, which covers the positions after a.
template <class T>
__device__ __noinline__ Segments<T> operator+(const Segments<T>& a, const Segments<T>& b) {
  Segments<T> all;
  all.sum = b.segment ? b.sum : a.sum + b.sum;
  all.retained = !b.edge ? a.retained : (b.afresh ? b.retained : a.sum + b.retained);
  all.count = a.count + b.count;
  all.edge = a.edge < b.edge ? b.edge : a.edge;
  all.segment = a.segment | b.segment;
  all.afresh = b.edge ? b.afresh | a.segment : a.afresh;
  return all;
}

template <class Tiles>
struct General {
  using T = typename Tiles::T;
  using Index = typename Tiles::Index;
  using Span = Segments<T>;
  using Sum = LogSum<T>;
  static constexpr int Block = Tiles::Block;

  const Tiles& tiles;
  typename Tiles::Pairs& my;

  // Clamped, so that the sum of two exponents is finite.
  static __device__ T clamp(T exponent) {
    constexpr T most = sizeof(T) == 4 ? T(8e37) : T(4e307);
    return exponent > most ? most : (exponent < -most ? -most : exponent);
  }
  __device__ T scale() const { return static_cast<T>(tiles.args.tau); }
  __device__ T exponent(T c) const { return clamp(scale() * (c - tiles.middle())); }
  __device__ T angle_exponent(T c) const { return clamp(-scale() * (angle(c) - tiles.middle_angle())); }

  template <class F>
  __device__ __forceinline__ void each_tile(const F& f) const {
    for (std::uint32_t tile = Tiles::Blocks::index(); tile < tiles.count(); tile += Tiles::Blocks::count()) f(tile);
  }

  // ---- Sweeps: sums over all positions, forwards and backwards. walk(reverse, span, count) visits the thread's
  // positions, twice. The first time, count is null, and walk only adds to `span`. The second time, it also writes what
  // depends on the sums so far, and `count` is the span's count over all positions.

  template <bool Reverse>
  __device__ __noinline__ std::uint32_t scan(Span& span, std::uint32_t tile, bool publish) const {
    Span total;
    span = block_exclusive<Reverse, Block>(span, tiles.template shared<Span>(), total);
    if (publish && threadIdx.x == 0) tiles.template spans<Span>(Reverse)[tile] = total;
    return total.count;
  }
  template <class Walk>
  __device__ __forceinline__ void sweep(const Walk& walk) {
    const bool several = tiles.count() > 1;
    Span ahead, behind;
    std::uint32_t count = 0;
    for (bool write = !several; ; write = true) {
      each_tile([&](std::uint32_t tile) {
        tiles.fetch(my, tile);
        ahead = behind = Span();
        walk(std::false_type(), ahead, nullptr);
        walk(std::true_type(), behind, nullptr);
        count = scan<false>(ahead, tile, !write);
        scan<true>(behind, tile, !write);
        if (!write) return;
        if (several) {
          ahead = tiles.template spans<Span>(false)[tile] + ahead;
          behind = tiles.template spans<Span>(true)[tile] + behind;
          count = tiles.template spans<Span>(false)[tiles.count()].count;
        }
        walk(std::false_type(), ahead, &count);
        walk(std::true_type(), behind, &count);
      });
      if (write) break;
      tiles.template join_tiles<Span, Span>();
    }
    tiles.sync();
  }

  // Walk along the order of the scores: compute the rank objective's sums, and the ranks.
  template <bool Reverse>
  __device__ __forceinline__ void by_score(Span& span, bool write) const {
    const PairwiseArgs& args = tiles.args;
    const Arrays<T, Index>& at = tiles.at;
#pragma unroll 1
    for (int i = 0; i < my.valid; ++i) {
      const int k = Reverse ? my.valid - 1 - i : i;
      const std::uint32_t p = my.base + k;
      if (Reverse ? my.ends(k) : my.begins(k)) span.edge = Reverse ? ~p : p + 1, ++span.count;
      const T own = args.rank ? exponent(my.c[k]) : T(0);
      if (write && !Reverse) {
        if (args.rank) at.before[p] = span.sum.log();
        at.run[p] = static_cast<Index>(span.count - 1);
        at.rank[p] = static_cast<Index>(span.edge - 1);  // the run's start; the backward walk replaces it by the rank
        if (args.angle) prepare(p, k);
      }
      if (args.rank) span.sum = span.sum + Sum(Reverse ? -own : own);
      if (write && Reverse) {
        if (args.rank) at.after[p] = span.sum.log();
        at.rank[p] = static_cast<Index>(doubled_rank<std::uint32_t>(args.ties, p, at.rank[p], ~span.edge, at.run[p]));
      }
    }
  }
  __device__ void prepare(std::uint32_t p, int k) const {
    const Arrays<T, Index>& at = tiles.at;
    at.term[p] = angle_exponent(my.c[k]);
    at.below[p] = at.above[p] = T(-INFINITY);
    at.order[0][p] = static_cast<Index>(p);
    at.label[p] = 0;
    if (!tiles.args.labels) return;
    at.label[p] = static_cast<std::uint64_t>(tiles.args.labels[index_of(my.pair[k])]) -
                  static_cast<std::uint64_t>(tiles.extent.label_low);
  }

  // ---- The angular objective, bit by bit of the labels.
  //
  // l_i > l_j exactly if l_i has a 1 at the highest bit where l_i and l_j differ. So for each bit, in a segment (pairs
  // that agree in all higher bits), pairs whose bit is 1 add to the forward sum, and pairs whose bit is 0 read it.
  // Backwards, zeros add and ones read. The first order is that of the scores. After each bit, all zeros move to the
  // front, which keeps segments together and scores sorted. bit = -1: without labels, all pairs add and read.

  struct Entry {
    std::uint32_t position, run;
    std::uint64_t label;
  };
  __device__ Entry entry(int which, std::uint32_t q) const {
    const std::uint32_t p = tiles.at.order[which][q];
    return {p, tiles.at.run[p], tiles.at.label[p]};
  }
  template <bool Reverse>
  __device__ __forceinline__ void by_bit(int bit, int which, Span& span, const std::uint32_t* zeros) const {
    if (my.valid == 0) return;
    const Arrays<T, Index>& at = tiles.at;
    const std::uint32_t first = Reverse ? my.base + my.valid - 1 : my.base, outer = Reverse ? tiles.n() - 1 : 0;
    Entry previous{};
    if (first != outer) previous = entry(which, Reverse ? first + 1 : first - 1);
#pragma unroll 1
    for (int k = 0; k < my.valid; ++k) {
      const std::uint32_t q = Reverse ? first - k : first + k;
      const Entry own = entry(which, q);
      const bool segment = q == outer || (bit >= 0 && own.label >> bit >> 1 != previous.label >> bit >> 1);
      if (segment) span.begin_segment();
      if (segment || own.run != previous.run) span.begin_run(1);
      const bool one = bit >= 0 && (own.label >> bit & 1);
      if (zeros) {
        T& sum = (Reverse ? at.above : at.below)[own.position];
        if (bit < 0 || one == Reverse) sum = (Sum(sum) + span.retained).log();
        if (!Reverse) at.order[which ^ 1][one ? *zeros + (q - span.count) : span.count] = static_cast<Index>(own.position);
      }
      if (bit < 0 || one != Reverse) span.sum = span.sum + Sum(Reverse ? -at.term[own.position] : at.term[own.position]);
      span.count += !one;
      previous = own;
    }
  }

  // ---- Partners in the rank objective are a prefix and a suffix of the order. count_below finds their ends: it
  // returns the number of positions whose doubled rank is below `bound`.

  __device__ std::uint32_t count_below(int bound) const {
    std::uint32_t low = 0, high = tiles.n();
    while (low < high) {
      const std::uint32_t half = low + (high - low) / 2;
      if (static_cast<int>(tiles.at.rank[half]) < bound) low = half + 1;
      else high = half;
    }
    return low;
  }
  // Calls f(k, position, doubled rank) for all pairs.
  template <class F>
  __device__ __forceinline__ void each_pair(const F& f) {
    each_tile([&](std::uint32_t tile) {
      tiles.fetch(my, tile);
#pragma unroll 1
      for (int k = 0; k < my.valid; ++k) f(k, my.base + k, static_cast<int>(tiles.at.rank[my.base + k]));
    });
  }
  // dL/dx - dL/dy of a pair with exponent x = -y, from the log-sums of its partners.
  static __device__ T derivative(T x, T below, T above, T loss) {
    return std::exp(above + x - loss) - std::exp(below - x - loss);
  }

  __device__ void run() {
    const PairwiseArgs& args = tiles.args;
    const Arrays<T, Index>& at = tiles.at;
    sweep([&](auto reverse, Span& span, const std::uint32_t* count) {
      by_score<decltype(reverse)::value>(span, count != nullptr);
    });
    int bit = -1, which = 0;
    if (args.labels) while (bit < 63 && tiles.label_range() >> (bit + 1)) ++bit;
    const bool all_equal = args.labels && bit < 0;  // all labels are equal: no pair has partners
    for (bool more = args.angle && !all_equal; more; more = --bit >= 0, which ^= 1) {
      sweep([&](auto reverse, Span& span, const std::uint32_t* zeros) {
        by_bit<decltype(reverse)::value>(bit, which, span, zeros);
      });
    }
    const int threshold = tiles.threshold();
    Both<Sum> z;
    each_pair([&](int k, std::uint32_t p, int rank) {
      if (args.rank) z.rank = z.rank + Sum(at.before[count_below(rank - threshold + 1)] - exponent(my.c[k]));
      if (args.angle) z.angle = z.angle + Sum(at.below[p] - at.term[p]);
    });
    z = tiles.of_all(z);
    const T rank_loss = softplus(z.rank.log()), angle_loss = softplus(z.angle.log());
    tiles.write_losses(rank_loss, angle_loss);
    if (!args.grads) return;
    each_pair([&](int k, std::uint32_t p, int rank) {
      T first = 0, second = 0;
      if (args.rank) {
        const std::uint32_t suffix = count_below(rank + threshold);
        first = static_cast<T>(args.tau * args.rank_weight) *
                derivative(exponent(my.c[k]), at.before[count_below(rank - threshold + 1)],
                           suffix < tiles.n() ? at.after[suffix] : T(-INFINITY), rank_loss);
      }
      if (args.angle) {
        second = static_cast<T>(args.tau * args.angle_weight) * angle_slope(my.c[k]) *
                 derivative(at.term[p], at.below[p], at.above[p], angle_loss);
      }
      tiles.write_gradient(my.pair[k], first, second);
    });
  }
};

}  // namespace raoe
