// The losses in the linear domain: prefix sums of exp(x) in double, where tau x range(c) leaves room for them.
//
// x is kept as T = exp(x); exp(y) is its reciprocal. All arrays are in sorted order. Work is cut into chunks whose
// borders depend on the data alone, so the sums do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "vector_math.h"

namespace raoe {

constexpr std::uint8_t run_start = 0x80;  // in `tags`: this pair's score differs from the one before it
constexpr std::uint8_t label_bits = 0x0f;
constexpr int max_classes = 16;           // distinct labels that the running sums take

struct Range {
  std::int64_t begin, end;
};

// ---- exp(x) of both objectives ----

template <class T, class C>
RAOE_INLINE void rank_terms(const C* __restrict c, T* __restrict x, std::int64_t n, double tau, double middle) {
  for (std::int64_t p = 0; p < n; ++p) x[p] = static_cast<T>(fast_exp<T>(tau * (c[p] - middle)));
}

template <class T, class C>
RAOE_INLINE void angle_terms(const C* __restrict c, T* __restrict x, std::int64_t n, double tau, double middle) {
  for (std::int64_t p = 0; p < n; ++p) {
    x[p] = static_cast<T>(fast_exp<T>(tau * (middle - fast_acos<T>(static_cast<double>(clip(c[p]))))));
  }
}

// ---- Running sums ----

struct RankSums {
  double x = 0, y = 0;
};

template <class T>
RAOE_INLINE RankSums rank_total(const T* __restrict x, std::int64_t n) {
  constexpr int lanes = 16;
  double sum_x[lanes] = {}, sum_y[lanes] = {};
  std::int64_t p = 0;
  for (; p + lanes <= n; p += lanes) {
    for (int k = 0; k < lanes; ++k) {
      sum_x[k] += x[p + k];
      sum_y[k] += T(1) / x[p + k];
    }
  }
  for (; p < n; ++p) {
    sum_x[0] += x[p];
    sum_y[0] += T(1) / x[p];
  }
  RankSums total;
  for (int k = 0; k < lanes; ++k) {
    total.x += sum_x[k];
    total.y += sum_y[k];
  }
  return total;
}

// before[p] = sum of x ahead of p. after[p] = sum of y from p on.
template <class T>
RAOE_INLINE void rank_before(const T* __restrict x, std::int64_t n, double sum, double* __restrict before) {
  for (std::int64_t p = 0; p < n; ++p) {
    before[p] = sum;
    sum += x[p];
  }
}
template <class T>
RAOE_INLINE void rank_after(const T* __restrict x, std::int64_t n, double sum, double* __restrict after) {
  for (std::int64_t p = n; p-- > 0;) {
    sum += T(1) / x[p];
    after[p] = sum;
  }
}

// Which running sums a pair of label l adds to: lane k of `x` gathers labels > k, lane k of `y` labels < k, so that a pair
// reads its partners' sum from the lane of its own label. Without labels there is one lane, which takes everybody.
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
RAOE_INLINE void angle_total(const Gate<lanes>& gate, const T* __restrict x, const std::uint8_t* __restrict tags,
                             std::int64_t n, AngleSums& total) {
  double sum_x[lanes] = {}, sum_y[lanes] = {};
  for (std::int64_t p = 0; p < n; ++p) {
    const int label = tags[p] & label_bits;
    const double value = x[p], inverse = T(1) / x[p];
    for (int k = 0; k < lanes; ++k) {
      sum_x[k] += value * gate.x[label][k];
      sum_y[k] += inverse * gate.y[label][k];
    }
  }
  for (int k = 0; k < lanes; ++k) {
    total.x[k] = sum_x[k];
    total.y[k] = sum_y[k];
  }
}

// below[p] = sum of x over the partners before p's run; the range holds whole runs.
template <int lanes, class T>
RAOE_INLINE void angle_below(const Gate<lanes>& gate, const T* __restrict x, const std::uint8_t* __restrict tags,
                             std::int64_t n, const AngleSums& carry, T* __restrict below) {
  double sum[lanes], seen[lanes];
  for (int k = 0; k < lanes; ++k) seen[k] = sum[k] = carry.x[k];
  for (std::int64_t p = 0; p < n; ++p) {
    const int label = tags[p] & label_bits;
    if (tags[p] & run_start) {
      for (int k = 0; k < lanes; ++k) seen[k] = sum[k];
    }
    below[p] = static_cast<T>(seen[lanes == 1 ? 0 : label]);
    const double value = x[p];
    for (int k = 0; k < lanes; ++k) sum[k] += value * gate.x[label][k];
  }
}
// above[p] = sum of y over the partners behind p's run.
template <int lanes, class T>
RAOE_INLINE void angle_above(const Gate<lanes>& gate, const T* __restrict x, const std::uint8_t* __restrict tags,
                             std::int64_t n, const AngleSums& carry, T* __restrict above) {
  double sum[lanes], seen[lanes];
  for (int k = 0; k < lanes; ++k) seen[k] = sum[k] = carry.y[k];
  for (std::int64_t p = n; p-- > 0;) {
    const int label = tags[p] & label_bits;
    above[p] = static_cast<T>(seen[lanes == 1 ? 0 : label]);
    const double inverse = T(1) / x[p];
    for (int k = 0; k < lanes; ++k) sum[k] += inverse * gate.y[label][k];
    if (tags[p] & run_start) {
      for (int k = 0; k < lanes; ++k) seen[k] = sum[k];
    }
  }
}

// ---- Z = sum of P_j exp(y_j), and x becomes exp(x) Q - exp(y) P, the gradient short of tau / (1 + Z) ----

// Eight sums side by side, because floating-point additions may not be reordered into vectors for us.
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

template <class T>
RAOE_INLINE double rank_combine(T* __restrict x, Range range, const double* __restrict before,
                                const double* __restrict after, const std::uint32_t* __restrict ends,
                                const std::uint32_t* __restrict starts) {
  if (after == nullptr) {
    return sum_of(range.begin, range.end, [=](std::int64_t p) RAOE_INLINE_LAMBDA { return T(1) / x[p] * before[ends[p]]; });
  }
  return sum_of(range.begin, range.end, [=](std::int64_t p) RAOE_INLINE_LAMBDA {
    const double term = T(1) / x[p] * before[ends[p]];
    x[p] = static_cast<T>(x[p] * after[starts[p]] - term);
    return term;
  });
}

template <class T, class C>
RAOE_INLINE double angle_combine(T* __restrict x, Range range, const T* __restrict below, const T* __restrict above,
                                 const C* __restrict c) {
  if (above == nullptr) {
    return sum_of(range.begin, range.end, [=](std::int64_t p) RAOE_INLINE_LAMBDA {
      return static_cast<double>(T(1) / x[p]) * below[p];
    });
  }
  return sum_of(range.begin, range.end, [=](std::int64_t p) RAOE_INLINE_LAMBDA {
    const double term = static_cast<double>(T(1) / x[p]) * below[p];
    x[p] = static_cast<T>((static_cast<double>(x[p]) * above[p] - term) * angle_slope(c[p]));
    return term;
  });
}

}  // namespace raoe
