// The general case: sums of exponentials beyond the range of double, and any number of distinct labels (K). One thread
// with plain loops: O(n) for the rank objective and O(n log K) for the angular objective.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "linear.h"

namespace raoe {

// PlainSum adds numbers. LogSum adds exponentials, which it receives and returns as exponents.
struct PlainSum {
  double sum = 0;
  void add(double value) { sum += value; }
  void add(const PlainSum& other) { sum += other.sum; }
  double value() const { return sum; }
  static double inverse(double value) { return 1 / value; }
};
struct LogSum {
  double max = -std::numeric_limits<double>::infinity(), sum = 0;
  void add(double exponent) { add(LogSum{exponent, 1}); }
  void add(const LogSum& other) {
    if (other.sum == 0 || other.max == -std::numeric_limits<double>::infinity()) return;
    if (other.max <= max) {
      sum += other.sum * std::exp(other.max - max);
    } else {
      sum = (sum == 0 ? 0 : sum * std::exp(max - other.max)) + other.sum;
      max = other.max;
    }
  }
  double value() const { return sum == 0 ? max : max + std::log(sum); }
  static double inverse(double exponent) { return -exponent; }
};

// Prefix sums over label ids, to which values can be added at any time (Fenwick, 1994). `tree` has size + 1 entries.
template <class Sum>
class PrefixSums {
 public:
  PrefixSums(Sum* tree, std::uint32_t size) : tree_(tree), size_(size) {
    for (std::uint32_t i = 0; i <= size_; ++i) tree_[i] = Sum();
  }
  void add(std::uint32_t id, double value) {
    for (std::uint64_t i = std::uint64_t{id} + 1; i <= size_; i += i & (~i + 1)) tree_[i].add(value);
  }
  double first(std::uint32_t count) const {
    Sum total;
    for (std::uint32_t i = count; i > 0; i &= i - 1) total.add(tree_[i]);
    return total.value();
  }

 private:
  Sum* tree_;
  std::uint32_t size_;
};

// Compute below and above (null if not needed) for any number of classes (distinct labels); id(p) is p's label id.
// With gated = false, all pairs with different scores are compared; classes is then 1 and every id 0.
template <class Sum, class T, class Id>
void angle_sums_by_tree(const T* x, const std::uint8_t* tags, std::int64_t n, const Id& id, std::uint32_t classes,
                        bool gated, Sum* tree, T* below, T* above) {
  {
    PrefixSums<Sum> sums(tree, classes);  // by descending label
    for (std::int64_t first = 0, end; first < n; first = end) {
      for (end = first + 1; end < n && !(tags[end] & run_start);) ++end;
      for (std::int64_t p = first; p < end; ++p) {
        below[p] = static_cast<T>(sums.first(gated ? classes - 1 - id(p) : classes));
      }
      for (std::int64_t p = first; p < end; ++p) sums.add(classes - 1 - id(p), x[p]);
    }
  }
  if (above == nullptr) return;
  PrefixSums<Sum> sums(tree, classes);  // by ascending label
  for (std::int64_t end = n, first; end > 0; end = first) {
    for (first = end - 1; !(tags[first] & run_start);) --first;
    for (std::int64_t p = first; p < end; ++p) above[p] = static_cast<T>(sums.first(gated ? id(p) : classes));
    for (std::int64_t p = first; p < end; ++p) sums.add(id(p), Sum::inverse(x[p]));
  }
}

// Clamp an exponent, so that the sum of two is finite.
inline double bounded(double exponent) {
  constexpr double bound = 8e307;
  return exponent > bound ? bound : (exponent < -bound ? -bound : exponent);
}

// Compute before[p] = logsumexp of x before p, and after[p] = logsumexp of y = -x from p on.
inline void rank_log_sums(const double* x, std::int64_t n, double* before, double* after) {
  LogSum sum;
  for (std::int64_t p = 0; p < n; ++p) {
    before[p] = sum.value();
    sum.add(x[p]);
  }
  if (after == nullptr) return;
  sum = LogSum();
  for (std::int64_t p = n; p-- > 0;) {
    sum.add(-x[p]);
    after[p] = sum.value();
  }
}

// Return L, and replace x by exp(x + Q - L) - exp(y + P - L). `below` and `above` return P and Q of a position.
template <class P, class Q>
double log_combine(double* x, std::int64_t n, const P& below, const Q& above, bool need_grad) {
  LogSum z;
  for (std::int64_t p = 0; p < n; ++p) z.add(below(p) - x[p]);
  const double loss = softplus(z.value());
  if (need_grad) {
    for (std::int64_t p = 0; p < n; ++p) x[p] = std::exp(x[p] + above(p) - loss) - std::exp(below(p) - x[p] - loss);
  }
  return loss;
}

}  // namespace raoe
