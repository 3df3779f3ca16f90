// Pairwise cosine on the CPU. Forward reads each row once for all widths. Backward reads and writes each row once, by
// segments: the columns between two widths.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "../simd.h"
#include "../team.h"
#include "cosine.h"

namespace raoe {
namespace {

constexpr std::int64_t elements_a_task = 1 << 15;
constexpr std::int64_t elements_a_thread = 1 << 17;  // with fewer elements, starting a thread costs more than it saves

using Dims = std::vector<std::int64_t>;

// Sums of a * b, a * a and b * b over a row, in type W, in parallel lanes: rounding errors grow with columns / lanes.
template <class W>
struct Products {
  static constexpr int lanes = 32;
  W ab[lanes] = {}, aa[lanes] = {}, bb[lanes] = {};

  template <class T>
  RAOE_INLINE void add(const T* __restrict a, const T* __restrict b, std::int64_t columns) {
    std::int64_t d = 0;
    for (; d + lanes <= columns; d += lanes) {
      for (int k = 0; k < lanes; ++k) add_element(a[d + k], b[d + k], k);
    }
    const int rest = static_cast<int>(columns - d);
    if (rest) {  // masked instead of a scalar loop: a segment may have fewer columns than lanes
      for (int k = 0; k < lanes; ++k) add_element(k < rest ? a[d + k] : T(0), k < rest ? b[d + k] : T(0), k);
    }
  }

 private:
  RAOE_INLINE void add_element(W x, W y, int k) {
    ab[k] += x * y;
    aa[k] += x * x;
    bb[k] += y * y;
  }
};

constexpr std::int64_t rows_at_once = 16;

// The sums of a few rows up to each width, (widths, 3, rows_at_once). The lanes of all rows are joined together, in
// vector additions; joining the lanes of a single row would take scalar additions.
template <class T>
class RowGroup {
 public:
  explicit RowGroup(std::size_t widths) : parts_(widths * 3 * rows_at_once * lanes), halves_(parts_.size() / 2) {}

  RAOE_INLINE void put(std::size_t width, std::int64_t row, const Products<T>& products) {
    forget(&products);
    T* const to = parts_.data() + (static_cast<std::int64_t>(width) * 3 * rows_at_once + row) * lanes;
    fold(products.ab, to);
    fold(products.aa, to + rows_at_once * lanes);
    fold(products.bb, to + 2 * rows_at_once * lanes);
  }

  RAOE_INLINE const T* join() {
    halve(parts_.data(), halves_.size(), halves_.data());
    halve(halves_.data(), halves_.size() / 2, parts_.data());
    halve(parts_.data(), halves_.size() / 4, halves_.data());
    return halves_.data();
  }

 private:
  static constexpr int lanes = 8;

  static RAOE_INLINE void fold(const T* __restrict of, T* __restrict to) {
    for (int k = 0; k < lanes; ++k) to[k] = (of[k] + of[k + lanes]) + (of[k + 2 * lanes] + of[k + 3 * lanes]);
  }
  static RAOE_INLINE void halve(const T* __restrict from, std::size_t count, T* __restrict to) {
    for (std::size_t i = 0; i < count; ++i) to[i] = from[2 * i] + from[2 * i + 1];
  }

  std::vector<T> parts_, halves_;
};

// Whether both sums of squares are safely inside float's range. For very small or large elements they are not.
RAOE_INLINE bool in_range(double aa, double bb) { return aa > 1e-28 && bb > 1e-28 && aa + bb < 1e38; }

// Compute a row's sums in double.
template <class T>
RAOE_NOINLINE void sum_in_double(const T* a, const T* b, std::int64_t columns, double& ab, double& aa, double& bb) {
  Products<double> products;
  products.add(a, b, columns);
  ab = aa = bb = 0;
  for (int k = 0; k < Products<double>::lanes; ++k) {
    ab += products.ab[k];
    aa += products.aa[k];
    bb += products.bb[k];
  }
}

// Gradient of a row: upstream gradient x d cosine / d row = other * across - row * own.
template <class T>
RAOE_INLINE void gradient(const T* __restrict row, const T* __restrict other, T* __restrict out, std::int64_t columns,
                          T across, T own) {
  for (std::int64_t d = 0; d < columns; ++d) out[d] = other[d] * across - row[d] * own;
}

// Compute cosines and inverse norms from the sums of a few rows. All are 0 for a row with a norm <= eps.
template <class T>
RAOE_INLINE void cosines(const double* __restrict ab, const double* __restrict aa, const double* __restrict bb,
                         std::int64_t rows, double eps, T* __restrict c, T* __restrict inverse_a,
                         T* __restrict inverse_b) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const double norm_a = std::sqrt(aa[r]), norm_b = std::sqrt(bb[r]);
    const bool is_zero = norm_a <= eps || norm_b <= eps;
    const double inv_a = 1 / norm_a, inv_b = 1 / norm_b, cosine = ab[r] * (inv_a * inv_b);
    inverse_a[r] = static_cast<T>(is_zero ? 0 : inv_a);
    inverse_b[r] = static_cast<T>(is_zero ? 0 : inv_b);
    c[r] = static_cast<T>(is_zero ? 0 : cosine);
  }
}

// dc/da = b / (|a| |b|) - c a / |a|^2. For a few rows: add the factors of b and of a to those of the wider widths.
template <class T>
RAOE_INLINE void add_factors(const T* __restrict grad, const T* __restrict c, const T* __restrict inverse_a,
                             const T* __restrict inverse_b, std::int64_t rows, bool more, const double* wider_across,
                             const double* wider_a, const double* wider_b, double* across, double* own_a,
                             double* own_b) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const double ia = inverse_a[r], ib = inverse_b[r], along = static_cast<double>(grad[r]) * c[r];
    across[r] = grad[r] * ia * ib + (more ? wider_across[r] : 0);
    own_a[r] = along * ia * ia + (more ? wider_a[r] : 0);
    own_b[r] = along * ib * ib + (more ? wider_b[r] : 0);
  }
}

// Calls body(first row, end row) for blocks of rows.
template <class Body>
void each_block(std::int64_t rows, std::int64_t columns, int threads, const Body& body) {
  const std::int64_t useful_threads = std::min<std::int64_t>(threads, rows * columns / elements_a_thread);
  Team team(static_cast<int>(std::max<std::int64_t>(useful_threads, 1)));
  const std::int64_t size = team.size() == 1 ? rows : std::max<std::int64_t>(elements_a_task / columns, 1);
  team.each((rows + size - 1) / size, [&](std::int64_t k) {
    vectorised([&]() RAOE_INLINE_LAMBDA { body(k * size, std::min(rows, (k + 1) * size)); });
  });
}

template <class T>
void forward(const CosineArgs& args, const Dims& dims, int threads) {
  const T *const a = static_cast<const T*>(args.a), *const b = static_cast<const T*>(args.b);
  each_block(args.rows, args.columns, threads, [&](std::int64_t first, std::int64_t end) RAOE_INLINE_LAMBDA {
    RowGroup<T> group(dims.size());
    for (std::int64_t r = first; r < end; r += rows_at_once) {
      const std::int64_t rows = std::min(rows_at_once, end - r);
      for (std::int64_t i = 0; i < rows; ++i) {
        const T *const row_a = a + (r + i) * args.stride_a, *const row_b = b + (r + i) * args.stride_b;
        Products<T> products;
        std::int64_t start = 0;
        for (std::size_t k = 0; k < dims.size(); ++k) {
          products.add(row_a + start, row_b + start, dims[k] - start);
          group.put(k, i, products);
          start = dims[k];
        }
      }
      const T* sums = group.join();
      for (std::size_t k = 0; k < dims.size(); ++k, sums += 3 * rows_at_once) {
        double ab[rows_at_once], aa[rows_at_once], bb[rows_at_once];
        bool all_in_range = true;
        for (std::int64_t i = 0; i < rows; ++i) {
          ab[i] = sums[i], aa[i] = sums[i + rows_at_once], bb[i] = sums[i + 2 * rows_at_once];
          all_in_range &= in_range(aa[i], bb[i]);
        }
        for (std::int64_t i = 0; !all_in_range && i < rows; ++i) {
          if (in_range(aa[i], bb[i])) continue;
          sum_in_double(a + (r + i) * args.stride_a, b + (r + i) * args.stride_b, dims[k], ab[i], aa[i], bb[i]);
        }
        const std::int64_t to = static_cast<std::int64_t>(k) * args.rows + r;
        cosines(ab, aa, bb, rows, args.eps, static_cast<T*>(args.c) + to, static_cast<T*>(args.inverse_a) + to,
                static_cast<T*>(args.inverse_b) + to);
      }
    }
  });
}

// Factors of a few rows, (widths, rows_at_once). They are copied side by side because the inputs of two widths are
// `rows` elements apart, often a power of two: reading those row by row would use a single set of the cache.
struct Factors {
  explicit Factors(std::size_t widths) : first(widths * rows_at_once), second(first), third(first) {}
  std::vector<double> first, second, third;
};

template <class T>
void backward(const CosineGradArgs& args, const Dims& dims, int threads) {
  const T *const a = static_cast<const T*>(args.a), *const b = static_cast<const T*>(args.b);
  const T *const grad = static_cast<const T*>(args.grad), *const c = static_cast<const T*>(args.c);
  const T* const inverse_a = static_cast<const T*>(args.inverse_a);
  const T* const inverse_b = static_cast<const T*>(args.inverse_b);
  T *const grad_a = static_cast<T*>(args.grad_a), *const grad_b = static_cast<T*>(args.grad_b);
  each_block(args.rows, args.columns, threads, [&](std::int64_t first, std::int64_t end) RAOE_INLINE_LAMBDA {
    Factors factors(dims.size());
    for (std::int64_t r = first; r < end; r += rows_at_once) {
      const std::int64_t group = std::min(rows_at_once, end - r);
      // A column's factors are the sum over all widths that include it, so sum from the widest to the narrowest width.
      for (std::size_t k = dims.size(); k-- > 0;) {
        const std::int64_t at = static_cast<std::int64_t>(k) * args.rows + r;
        const std::size_t to = k * rows_at_once, wider = k + 1 < dims.size() ? to + rows_at_once : to;
        add_factors(grad + at, c + at, inverse_a + at, inverse_b + at, group, wider != to, &factors.first[wider],
                    &factors.second[wider], &factors.third[wider], &factors.first[to], &factors.second[to],
                    &factors.third[to]);
      }
      for (std::int64_t i = 0; i < group; ++i) {
        const T *const row_a = a + (r + i) * args.stride_a, *const row_b = b + (r + i) * args.stride_b;
        T* const out_a = grad_a ? grad_a + (r + i) * args.columns : nullptr;
        T* const out_b = grad_b ? grad_b + (r + i) * args.columns : nullptr;
        std::int64_t start = 0;
        std::size_t from = static_cast<std::size_t>(i);
        for (const std::int64_t end_of_width : dims) {
          const std::int64_t width = end_of_width - start;
          const T across = static_cast<T>(factors.first[from]);
          const T own_a = static_cast<T>(factors.second[from]), own_b = static_cast<T>(factors.third[from]);
          if (out_a) gradient(row_a + start, row_b + start, out_a + start, width, across, own_a);
          if (out_b) gradient(row_b + start, row_a + start, out_b + start, width, across, own_b);
          start = end_of_width;
          from += rows_at_once;
        }
        if (out_a) std::fill(out_a + start, out_a + args.columns, T(0));
        if (out_b) std::fill(out_b + start, out_b + args.columns, T(0));
      }
    }
  });
}

}  // namespace

void cosine_cpu(const CosineArgs& args, const Dims& dims, int threads) {
  if (args.type == Float::f64) return forward<double>(args, dims, threads);
  if (args.type == Float::f32) return forward<float>(args, dims, threads);
  throw std::invalid_argument("rows must be float32 or float64");
}

void cosine_grad_cpu(const CosineGradArgs& args, const Dims& dims, int threads) {
  if (args.type == Float::f64) return backward<double>(args, dims, threads);
  if (args.type == Float::f32) return backward<float>(args, dims, threads);
  throw std::invalid_argument("rows must be float32 or float64");
}

}  // namespace raoe
