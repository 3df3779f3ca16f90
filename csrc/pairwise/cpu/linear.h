// The losses from sums of plain exponentials: prefix sums of exp(x) in double. tau x range(c) must be small enough.
//
// Arrays x and y hold exp(x) and its reciprocal exp(y) in type T. All arrays are in sorted order. Chunk borders
// depend on the data only, so the sums do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "vector_math.h"

namespace raoe {

constexpr std::uint8_t run_start = 0x80;  // in `tags`: this pair's score differs from the score before it
constexpr std::uint8_t label_bits = 0x0f;
constexpr int max_classes = 16;           // largest number of distinct labels that the running sums support

struct Range {
  std::int64_t begin, end;
};

// ---- exp(x) and exp(y) of both objectives ----

template <class T, class C>
RAOE_INLINE void rank_terms(const C* __restrict c, T* __restrict x, T* __restrict y, std::int64_t n, double tau,
                            double middle) {
  for (std::int64_t p = 0; p < n; ++p) {
    x[p] = static_cast<T>(fast_exp<T>(tau * (c[p] - middle)));
    y[p] = T(1) / x[p];
  }
}

template <class T, class C>
RAOE_INLINE void angle_terms(const C* __restrict c, T* __restrict x, T* __restrict y, std::int64_t n, double tau,
                             double middle) {
  for (std::int64_t p = 0; p < n; ++p) {
    x[p] = static_cast<T>(fast_exp<T>(tau * (middle - fast_acos<T>(static_cast<double>(clip(c[p]))))));
    y[p] = T(1) / x[p];
  }
}

// ---- Running sums ----

// Eight parallel sums, because the compiler may not reorder floating-point additions into vectors.
template <class Term>
RAOE_INLINE double sum_of(std::int64_t begin, std::int64_t end, const Term& term) {
  constexpr int lanes = 8;
  double sums[lanes] = {};
  std::int64_t p = begin;
  for (; p + lanes <= end; p += lanes) {
    for (int k = 0; k < lanes; ++k) sums[k] += term(p + k);
  }
  for (; p < end; ++p) sums[0] += term(p);
  double total = 0;
  for (int k = 0; k < lanes; ++k) total += sums[k];
  return total;
}

struct RankSums {
  double x = 0, y = 0;
};

template <class T>
RAOE_INLINE RankSums rank_total(const T* __restrict x, const T* __restrict y, std::int64_t n) {
  return {sum_of(0, n, [=](std::int64_t p) RAOE_INLINE_LAMBDA { return static_cast<double>(x[p]); }),
          sum_of(0, n, [=](std::int64_t p) RAOE_INLINE_LAMBDA { return static_cast<double>(y[p]); })};
}

// Compute before[p] = sum of x before p, and after[p] (null if not needed) = sum of y from p on. Both share a loop:
// each sum is a chain of dependent additions, and two such chains take the time of one.
template <class T>
RAOE_INLINE void rank_sweep(const T* __restrict x, const T* __restrict y, std::int64_t n, RankSums sum,
                            double* __restrict before, double* __restrict after) {
  if (after == nullptr) {
    for (std::int64_t p = 0; p < n; ++p) {
      before[p] = sum.x;
      sum.x += x[p];
    }
    return;
  }
  for (std::int64_t p = 0, q = n - 1; p < n; ++p, --q) {
    before[p] = sum.x;
    sum.x += x[p];
    sum.y += y[q];
    after[q] = sum.y;
  }
}

// Which running sums a pair of label l adds to: lane k of `x` sums labels > k, lane
// k of `y` sums labels < k. So a pair reads its partners' sum from the lane of its
// own label. Without labels there is a single lane, and all pairs add to it.
template <int lanes>
struct Gate {
  double x[max_classes][lanes], y[max_classes][lanes];
  explicit Gate(bool labels) {
    for (int label = 0; label < max_classes; ++label) {
      for (int k = 0; k < lanes; ++k) {
        x[label][k] = !labels || label > k ? 1 : 0;
        y[label][k] = !labels || label < k ? 1 : 0;
      }
    }
  }
};

struct AngleSums {
  double x[max_classes] = {}, y[max_classes] = {};
};

template <int lanes, class T>
RAOE_INLINE void angle_total(const Gate<lanes>& gate, const T* __restrict x, const T* __restrict y,
                             const std::uint8_t* __restrict tags, std::int64_t n, AngleSums& total) {
  double sum_x[lanes] = {}, sum_y[lanes] = {};
  for (std::int64_t p = 0; p < n; ++p) {
    const int label = tags[p] & label_bits;
    const double value_x = x[p], value_y = y[p];
    for (int k = 0; k < lanes; ++k) {
      sum_x[k] += value_x * gate.x[label][k];
      sum_y[k] += value_y * gate.y[label][k];
    }
  }
  for (int k = 0; k < lanes; ++k) {
    total.x[k] = sum_x[k];
    total.y[k] = sum_y[k];
  }
}

// Compute below[p] = sum of x over the partners before p's run, and above[p] (null if not
// needed) = sum of y over the partners after it. The range consists of whole runs. Pairs read
// the sums from before their run (`retained`), so a run's terms become visible only at its end.
template <int lanes, class T>
RAOE_INLINE void angle_sweep(const Gate<lanes>& gate, const T* __restrict x, const T* __restrict y,
                             const std::uint8_t* __restrict tags, std::int64_t n, const AngleSums& carry,
                             T* __restrict below, T* __restrict above) {
  double sum_x[lanes], retained_x[lanes], sum_y[lanes], retained_y[lanes];
  for (int k = 0; k < lanes; ++k) {
    retained_x[k] = sum_x[k] = carry.x[k];
    retained_y[k] = sum_y[k] = carry.y[k];
  }
  for (std::int64_t p = 0, q = n - 1; p < n; ++p, --q) {
    const int label = tags[p] & label_bits;
    if (tags[p] & run_start) {
      for (int k = 0; k < lanes; ++k) retained_x[k] = sum_x[k];
    }
    below[p] = static_cast<T>(retained_x[lanes == 1 ? 0 : label]);
    const double value_x = x[p];
    for (int k = 0; k < lanes; ++k) sum_x[k] += value_x * gate.x[label][k];
    if (above == nullptr) continue;
    const int other = tags[q] & label_bits;
    above[q] = static_cast<T>(retained_y[lanes == 1 ? 0 : other]);
    const double value_y = y[q];
    for (int k = 0; k < lanes; ++k) sum_y[k] += value_y * gate.y[other][k];
    if (tags[q] & run_start) {
      for (int k = 0; k < lanes; ++k) retained_y[k] = sum_y[k];
    }
  }
}

// ---- Return Z = sum of P_j exp(y_j), and replace x by exp(x) Q - exp(y) P, the gradient without tau / (1 + Z) ----

template <class T>
RAOE_INLINE double rank_combine(T* __restrict x, const T* __restrict y, Range range, const double* __restrict before,
                                const double* __restrict after, const std::uint32_t* __restrict ends,
                                const std::uint32_t* __restrict starts) {
  if (after == nullptr) {
    return sum_of(range.begin, range.end, [=](std::int64_t p) RAOE_INLINE_LAMBDA { return y[p] * before[ends[p]]; });
  }
  return sum_of(range.begin, range.end, [=](std::int64_t p) RAOE_INLINE_LAMBDA {
    const double term = y[p] * before[ends[p]];
    x[p] = static_cast<T>(x[p] * after[starts[p]] - term);
    return term;
  });
}

template <class T, class C>
RAOE_INLINE double angle_combine(T* __restrict x, const T* __restrict y, Range range, const T* __restrict below,
                                 const T* __restrict above, const C* __restrict c) {
  if (above == nullptr) {
    return sum_of(range.begin, range.end, [=](std::int64_t p) RAOE_INLINE_LAMBDA {
      return static_cast<double>(y[p]) * below[p];
    });
  }
  return sum_of(range.begin, range.end, [=](std::int64_t p) RAOE_INLINE_LAMBDA {
    const double term = static_cast<double>(y[p]) * below[p];
    x[p] = static_cast<T>((static_cast<double>(x[p]) * above[p] - term) * angle_slope(c[p]));
    return term;
  });
}

}  // namespace raoe
