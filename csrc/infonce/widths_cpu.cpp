// Processes one row for all widths at a time, so that its logits and exponentials stay in the innermost caches.
//
//   logits   running sums of the products, the logits x, and the largest x
//   sums     exp(x - largest) over all columns except the own one
//   weights  the products' gradients, summed from the widest width on
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "../pairwise/cpu/vector_math.h"
#include "../team.h"
#include "widths.h"

namespace raoe {
namespace {

constexpr std::int64_t cells_a_part = 1 << 15;    // with fewer cells, starting a thread costs more than it saves
constexpr std::int64_t rows_a_part = 32;          // with fewer rows, separate column sums cost more than they save
constexpr std::int64_t max_parts = 64;
constexpr std::int64_t block = 1024;              // columns that are summed in T before the sums are added in double
constexpr int lanes = 32;

// exp(x) for x <= 0, exactly 0 near the end of exp's range. For float: accurate to an ulp, and vectorises by sixteen.
RAOE_INLINE double exp_below_0(double x) { return x < -700.0 ? 0.0 : fast_exp<double>(x < -700.0 ? -700.0 : x); }
RAOE_INLINE float exp_below_0(float x) {
  constexpr float log2_e = 0x1.715476p0f, shifter = 0x1.8p23f;
  constexpr float ln2_high = 0x1.62e4p-1f, ln2_low = 0x1.7f7d1cp-20f;  // k ln2_high is exact
  const float inside = x < -87.0f ? -87.0f : x;
  const float shifted = inside * log2_e + shifter;
  const float k = shifted - shifter;
  const float r = (inside - k * ln2_high) - k * ln2_low;
  const float high = (0x1.6d1116p-10f * r + 0x1.120b7cp-7f) * r + 0x1.55551ap-5f;  // as Coefficients<float>
  const float value = 1.0f + (r + (r * r) * (high * (r * r) + (0x1.5554dcp-3f * r + 0.5f)));
  const float result = bits_of<float>(bits_of<std::uint32_t>(value) + (bits_of<std::uint32_t>(shifted) << 23));
  return x < -87.0f ? 0.0f : result;
}

// Write the running sums to `dots` and the logits x to `logits`. Returns the largest x.
template <bool first, bool masked, class T>
RAOE_INLINE T make_logits(const T* __restrict before, T* __restrict dots, const T* __restrict of_columns, T of_row,
                          const std::uint8_t* __restrict ignored, std::int64_t own, std::int64_t columns,
                          T* __restrict logits) {
  constexpr T minus_inf = -std::numeric_limits<T>::infinity();
  T largest[lanes];
  for (int l = 0; l < lanes; ++l) largest[l] = minus_inf;
  const auto add_column = [&](std::int64_t j, int l) RAOE_INLINE_LAMBDA {
    const T dot = first ? dots[j] : dots[j] + before[j];
    T x = dot * of_row * of_columns[j];
    if (masked) x = ignored[j] ? minus_inf : x;
    dots[j] = dot;
    logits[j] = x;
    largest[l] = x > largest[l] ? x : largest[l];
  };
  std::int64_t j = 0;
  for (; j + lanes <= columns; j += lanes) {
    for (int l = 0; l < lanes; ++l) add_column(j + l, l);
  }
  for (; j < columns; ++j) add_column(j, 0);
  logits[own] = dots[own] * of_row * of_columns[own];
  largest[0] = std::max(largest[0], logits[own]);
  return *std::max_element(largest, largest + lanes);
}

struct RowSums {
  double neg_sum = 0, along = 0;  // sums of exp(y) and of exp(y) y, with y = x - largest
};

// Replace x by exp(x - largest), and by 0 at `own`.
template <class T>
RAOE_INLINE RowSums exponentials(T* __restrict x, std::int64_t columns, std::int64_t own, T largest) {
  constexpr T lowest = sizeof(T) == 4 ? T(-87) : T(-700);
  x[own] = -std::numeric_limits<T>::infinity();
  RowSums sums;
  for (std::int64_t begin = 0; begin < columns; begin += block) {
    const std::int64_t end = std::min(columns, begin + block);
    T neg_sum[lanes] = {}, along[lanes] = {};
    const auto add_column = [&](std::int64_t j, int l) RAOE_INLINE_LAMBDA {
      const T y = x[j] - largest, e = exp_below_0(y);
      x[j] = e;
      neg_sum[l] += e;
      along[l] += e * (y < lowest ? lowest : y);
    };
    std::int64_t j = begin;
    for (; j + lanes <= end; j += lanes) {
      for (int l = 0; l < lanes; ++l) add_column(j + l, l);
    }
    for (; j < end; ++j) add_column(j, 0);
    for (int l = 0; l < lanes; ++l) {
      sums.neg_sum += neg_sum[l];
      sums.along += along[l];
    }
  }
  return sums;
}

// Replace the dots by their gradient: e x weight x of_columns, plus the gradient from wider widths.
template <bool last, class T>
RAOE_INLINE void make_weights(const T* __restrict e, const T* __restrict of_columns, T weight,
                              const T* __restrict wider, T* __restrict dots, T* __restrict along, std::int64_t columns) {
  for (std::int64_t j = 0; j < columns; ++j) {
    const T by_dot = e[j] * (weight * of_columns[j]);
    along[j] += by_dot * dots[j];
    dots[j] = last ? by_dot : by_dot + wider[j];
  }
}

template <class T>
struct Rows {
  const WidthsArgs& args;
  std::vector<T> logits = std::vector<T>(static_cast<std::size_t>(args.widths * args.columns));
  std::vector<T> weights = std::vector<T>(static_cast<std::size_t>(args.widths));

  RAOE_INLINE void row(std::int64_t i, T* along) {
    const std::int64_t columns = args.columns, own = args.own[i];
    const std::uint8_t* const ignored = args.ignored ? args.ignored + i * columns : nullptr;
    const bool gradients = args.along_rows != nullptr;
    for (std::int64_t k = 0; k < args.widths; ++k) {
      T *const dots = row_of(k, i), *const x = logits.data() + k * columns;
      const T* const before = k ? row_of(k - 1, i) : nullptr;
      const T* const of_columns = static_cast<const T*>(args.of_columns) + k * columns;
      const std::int64_t at = k * args.rows + i;
      const T of_row = static_cast<const T*>(args.of_rows)[at];
      const T largest =
          k == 0 ? ignored ? make_logits<true, true>(before, dots, of_columns, of_row, ignored, own, columns, x)
                           : make_logits<true, false>(before, dots, of_columns, of_row, ignored, own, columns, x)
          : ignored ? make_logits<false, true>(before, dots, of_columns, of_row, ignored, own, columns, x)
                    : make_logits<false, false>(before, dots, of_columns, of_row, ignored, own, columns, x);
      const double own_logit = static_cast<double>(x[own]) - static_cast<double>(largest);
      const RowSums sums = exponentials(x, columns, own, largest);
      // Leave the positive out of the sum, which then has the size of the loss, so that a small loss keeps its digits.
      const double own_exp = std::exp(own_logit), ratio = sums.neg_sum / own_exp, full_sum = sums.neg_sum + own_exp;
      static_cast<T*>(args.losses)[at] =
          static_cast<T>(ratio < 1e30 ? std::log1p(ratio) : std::log(sums.neg_sum) - own_logit);
      if (!gradients) continue;
      const double factor = static_cast<const T*>(args.factors)[k];
      static_cast<T*>(args.along_rows)[at] =
          static_cast<T>(factor * (sums.along - sums.neg_sum * own_logit) / full_sum);
      weights[static_cast<std::size_t>(k)] = static_cast<T>(factor * of_row / full_sum);
      x[own] = static_cast<T>(-sums.neg_sum);
    }
    if (!gradients) return;
    for (std::int64_t k = args.widths; k-- > 0;) {
      const T* const e = logits.data() + k * columns;
      const T* const of_columns = static_cast<const T*>(args.of_columns) + k * columns;
      const T weight = weights[static_cast<std::size_t>(k)];
      T* const sums = along + k * columns;
      if (k + 1 == args.widths) {
        make_weights<true>(e, of_columns, weight, e, row_of(k, i), sums, columns);
      } else {
        make_weights<false>(e, of_columns, weight, row_of(k + 1, i), row_of(k, i), sums, columns);
      }
    }
  }

 private:
  T* row_of(std::int64_t k, std::int64_t i) const {
    return static_cast<T*>(args.dots) + (k * args.rows + i) * args.columns;
  }
};

template <class T>
void each_row(const WidthsArgs& args, int threads) {
  const std::int64_t cells = args.widths * args.rows * args.columns;
  // Every part has its own column sums, and parts depend on the data only: results are the same for any thread count.
  const std::int64_t useful_parts = std::min(max_parts, std::min(args.rows / rows_a_part, cells / cells_a_part));
  const std::int64_t parts = std::max<std::int64_t>(useful_parts, 1);
  Team team(static_cast<int>(std::min<std::int64_t>(threads, parts)));
  std::vector<Rows<T>> memory;
  for (int k = 0; k < team.size(); ++k) memory.push_back({args});
  const std::int64_t size = args.along_rows ? args.widths * args.columns : 0;
  std::vector<T> sums(static_cast<std::size_t>(parts * size));
  team.each(team.size(), [&](std::int64_t k) {
    vectorised([&]() RAOE_INLINE_LAMBDA {
      for (std::int64_t part = k; part < parts; part += team.size()) {
        T* const along = sums.data() + part * size;
        for (std::int64_t i = args.rows * part / parts; i < args.rows * (part + 1) / parts; ++i) {
          memory[static_cast<std::size_t>(k)].row(i, along);
        }
      }
    });
  });
  T* const along = static_cast<T*>(args.along_columns);
  for (std::int64_t part = 0; part < parts; ++part) {
    for (std::int64_t j = 0; j < size; ++j) along[j] += sums[static_cast<std::size_t>(part * size + j)];
  }
}

}  // namespace

void info_nce_widths_cpu(const WidthsArgs& args, int threads) {
  if (args.type == Float::f64) return each_row<double>(args, threads);
  if (args.type == Float::f32) return each_row<float>(args, threads);
  throw std::invalid_argument("rows must be float32 or float64");
}

}  // namespace raoe
