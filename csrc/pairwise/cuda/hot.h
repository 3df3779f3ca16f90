// The common case of the pairwise losses: float32, plain sums of exponentials, average ranks, for the angular objective
// at most three consecutive labels, and one tile per block. A thread's pairs stay in registers: loops are unrolled.
#pragma once

#include "tiles.h"

namespace raoe {

enum : int { RANK = 1, ANGLE = 2 };
constexpr int COLUMN_LABELS = 3;  // number of labels for which two columns of sums suffice

__device__ __forceinline__ float power_of_two(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));  // accurate to 2 ulp
  return y;
#else
  return exp2f(x);
#endif
}

// Partial sums of a range of positions, in one direction. `retained` is `sum` at the start of the range's last run.
// Pairs of that run read `retained`, because pairs with equal scores are not partners.
template <class Sum>
struct Columns {
  Sum rank{}, sum[2]{}, retained[2]{};
  std::uint32_t edge = 0;  // 1 + start of the last run (backwards: ~ its end), or 0 for no run

  Columns() = default;
  template <class Other>
  __device__ __forceinline__ explicit Columns(const Columns<Other>& other)
      : rank(other.rank), sum{Sum(other.sum[0]), Sum(other.sum[1])},
        retained{Sum(other.retained[0]), Sum(other.retained[1])}, edge(other.edge) {}

  // Add a pair with label 0, 1 or 2. If the pair begins a run, `place` is the new edge. Returns the sum of the pair's
  // partners: of earlier runs and larger labels (Reverse: of later runs and smaller labels).
  template <bool Reverse>
  __device__ __forceinline__ Sum add(bool begins, std::uint32_t place, Sum rank_term, int label, Sum term) {
    rank += rank_term;
    if (begins) edge = place, retained[0] = sum[0], retained[1] = sum[1];
    if (Reverse ? label < 1 : label > 0) sum[0] += term;
    if (Reverse ? label < 2 : label > 1) sum[1] += term;
    if (label == 1) return retained[Reverse ? 0 : 1];
    return label == (Reverse ? 2 : 0) ? retained[Reverse ? 1 : 0] : Sum(0);
  }
};
// Join span a with span b, which covers the positions after a.
template <class Sum>
__device__ __forceinline__ Columns<Sum> operator+(const Columns<Sum>& a, const Columns<Sum>& b) {
  Columns<Sum> all;
  all.rank = a.rank + b.rank;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    all.sum[k] = a.sum[k] + b.sum[k];
    all.retained[k] = b.edge ? a.sum[k] + b.retained[k] : a.retained[k];
  }
  all.edge = a.edge < b.edge ? b.edge : a.edge;
  return all;
}

template <int Objectives, class Tiles>
struct Hot {
  static constexpr bool ranked = Objectives & RANK, angled = Objectives & ANGLE;
  static constexpr int Items = Tiles::items;
  // Slopes are multiplied by SMALL, as their products may overflow, and shares by 1 / SMALL, as they may underflow.
  static constexpr float SMALL = 0x1p-24f;
  using Index = typename Tiles::Index;
  using Span = Columns<float>;

  const Tiles& tiles;
  typename Tiles::Pairs& my;
  float x[Items];                           // exponent of the rank objective, to base 2
  float angle_x[Items], angle_slope[Items];  // exponent of the angular objective and its derivative
  float rank_grad[Items], angle_grad[Items];
  int rank[Items];                          // doubled rank
  std::uint64_t labels;                     // label minus the smallest label, two bits per pair

  // Exponentials are computed again whenever they are needed, which is cheaper than storing them.
  template <bool Inverse>
  __device__ __forceinline__ float term(const float (&exponent)[Items], int k) const {
    return k < my.valid ? power_of_two(Inverse ? -exponent[k] : exponent[k]) : 0.0f;
  }
  template <bool Reverse>
  __device__ __forceinline__ float add(Span& span, int k) const {
    return span.template add<Reverse>(Reverse ? my.ends(k) : my.begins(k), Reverse ? ~(my.base + k) : my.base + k + 1,
                                      ranked ? term<Reverse>(x, k) : 0.0f, angled ? labels >> 2 * k & 3 : 0,
                                      angled ? term<Reverse>(angle_x, k) : 0.0f);
  }

  __device__ __forceinline__ void find_exponents() {
    const float scale = static_cast<float>(tiles.args.tau * 1.4426950408889634);
    const float middle = tiles.middle(), middle_angle = tiles.middle_angle();
    const auto smallest = static_cast<std::uint32_t>(tiles.extent.label_low) << LABEL_SHIFT;
    labels = 0;
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      x[k] = scale * (my.c[k] - middle);
      if (!angled) continue;
      angle_x[k] = scale * (middle_angle - angle(my.c[k]));
      angle_slope[k] = SMALL * raoe::angle_slope(my.c[k]);
      labels |= static_cast<std::uint64_t>((my.pair[k] - smallest) >> LABEL_SHIFT) << 2 * k;
    }
  }

  // Replace the thread's span by the sum of all earlier positions (Reverse: of all later ones).
  template <bool Reverse>
  __device__ __forceinline__ void scan(Span& span, std::uint32_t tile) const {
    Span total;
    span = block_exclusive<Reverse, Tiles::Block>(span, tiles.template shared<Span>(), total);
    if (tiles.count() > 1 && threadIdx.x == 0) tiles.template spans<Span>(Reverse)[tile] = total;
  }

  // Write the tables of the rank objective; compute the angular objective. Stores are groups of 16 bytes or more.
  __device__ __forceinline__ void write_tables(Span ahead, Span behind, Both<float>& z) {
    constexpr int group = Items < 4 ? Items : 4;
    const Arrays<float, Index>& at = tiles.at;
    float partners[Items];
    int first[Items];
#pragma unroll
    for (int j = 0; j < Items; j += group) {
      Neighbours<float, group> before;
#pragma unroll
      for (int i = 0; i < group; ++i) {
        const int k = j + i;
        before.at[i] = ahead.rank;
        partners[k] = add<false>(ahead, k);
        first[k] = static_cast<int>(ahead.edge - 1);
      }
      if (ranked) *reinterpret_cast<Neighbours<float, group>*>(at.before + my.base + j) = before;
    }
#pragma unroll
    for (int j = Items - group; j >= 0; j -= group) {
      Neighbours<float, group> after;
      Neighbours<Index, 2 * group> ends;
#pragma unroll
      for (int i = group - 1; i >= 0; --i) {
        const int k = j + i, position = my.base + k;
        const float above = add<true>(behind, k);
        const int end = static_cast<int>(~behind.edge + 1);
        after.at[i] = behind.rank;
        rank[k] = doubled_rank(Ties::average, position, first[k], end - 1, 0);
        ends.at[2 * i] = static_cast<Index>(rank[k] <= 2 * position ? end : first[k]);
        ends.at[2 * i + 1] = static_cast<Index>(rank[k] <= 2 * position + 1 ? end : first[k]);
        if (!angled) continue;
        const float own = term<false>(angle_x, k), inverse = term<true>(angle_x, k);
        z.angle += inverse * partners[k];
        angle_grad[k] = angle_slope[k] * (own * above - inverse * partners[k]);
      }
      if (!ranked) continue;
      *reinterpret_cast<Neighbours<float, group>*>(at.after + my.base + j) = after;
      *reinterpret_cast<Neighbours<Index, 2 * group>*>(at.ends + 2 * (my.base + j)) = ends;
    }
    if (ranked && my.base == 0) at.ends[-1] = 0;
    if (ranked && my.base + Items == tiles.n() && threadIdx.x + 1 == Tiles::Block) at.after[tiles.n()] = 0;
  }

  // The partners in the rank objective are a prefix and a suffix of the order. Read their sums from the tables.
  __device__ __forceinline__ void look_up(Both<float>& z) {
    const int threshold = tiles.threshold(), limit = 2 * static_cast<int>(tiles.n()) - 1;
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      if (k >= my.valid) continue;
      const int down = rank[k] - threshold, up = rank[k] + threshold - 1;
      const float below = tiles.at.before[tiles.at.ends[down < -1 ? -1 : down]];
      const float above = tiles.at.after[tiles.at.ends[up < limit ? up : limit]];
      const float inverse = term<true>(x, k);
      z.rank += inverse * below;
      rank_grad[k] = SMALL * (term<false>(x, k) * above - inverse * below);
    }
  }

  __device__ __forceinline__ void run() {
    const std::uint32_t tile = Tiles::Blocks::index();
    tiles.fetch(my, tile);
    find_exponents();
    Span ahead, behind;
#pragma unroll
    for (int k = 0; k < Items; ++k) add<false>(ahead, k);
#pragma unroll
    for (int k = Items - 1; k >= 0; --k) add<true>(behind, k);
    scan<false>(ahead, tile);
    scan<true>(behind, tile);
    if (tiles.count() > 1) {
      tiles.template join_tiles<Span, Columns<double>>();
      ahead = tiles.template spans<Span>(false)[tile] + ahead;
      behind = tiles.template spans<Span>(true)[tile] + behind;
    }
    Both<float> part;
    write_tables(ahead, behind, part);
    tiles.sync();
    if (ranked) look_up(part);
    const Both<double> z = tiles.of_all(Both<double>{part.rank, part.angle});
    tiles.write_losses(static_cast<float>(log1p(z.rank)), static_cast<float>(log1p(z.angle)));
    if (!tiles.args.grads) return;
    const float rank_share = static_cast<float>(tiles.args.tau * tiles.args.rank_weight) * share(z.rank);
    const float angle_share = static_cast<float>(tiles.args.tau * tiles.args.angle_weight) * share(z.angle);
    tiles.read_pairs(my);  // reading the pairs again is cheaper than keeping them in registers
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      if (k >= my.valid) continue;
      tiles.write_gradient(my.pair[k], ranked ? rank_grad[k] * rank_share : 0.0f, angled ? angle_grad[k] * angle_share : 0.0f);
    }
  }
  // 1 / (1 + Z) / SMALL. 1 + Z may exceed float's range, so it is scaled down first.
  static __device__ float share(double z) { return 0x1p-48f / SMALL / static_cast<float>((1 + z) * 0x1p-48); }
};

}  // namespace raoe
