// Pairwise cosine on the CPU: each row is read once in forward, for all widths; in backward it is read and written
// once, by the segments of columns between two widths.
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
constexpr std::int64_t elements_a_thread = 1 << 17;  // fewer do not pay for starting one

using Dims = std::vector<std::int64_t>;

struct Products {
  double ab = 0, aa = 0, bb = 0;
};

// Adds the products of whole blocks of `lanes` columns from d on, which are summed side by side in W and joined pair by
// pair: so an error grows with columns / lanes.
template <int lanes, class W, class T>
RAOE_INLINE void add_blocks(const T* __restrict a, const T* __restrict b, std::int64_t columns, std::int64_t& d,
                            Products& sums) {
  if (d + lanes > columns) return;
  W ab[lanes] = {}, aa[lanes] = {}, bb[lanes] = {};
  for (; d + lanes <= columns; d += lanes) {
    for (int k = 0; k < lanes; ++k) {
      const W x = a[d + k], y = b[d + k];
      ab[k] += x * y;
      aa[k] += x * x;
      bb[k] += y * y;
    }
  }
  for (int half = lanes / 2; half; half /= 2) {
    for (int k = 0; k < half; ++k) {
      ab[k] += ab[k + half];
      aa[k] += aa[k + half];
      bb[k] += bb[k + half];
    }
  }
  sums.ab += ab[0];
  sums.aa += aa[0];
  sums.bb += bb[0];
}

template <class W, class T>
RAOE_INLINE Products products(const T* a, const T* b, std::int64_t columns) {
  Products sums;
  std::int64_t d = 0;
  add_blocks<32, W>(a, b, columns, d, sums);
  add_blocks<8, W>(a, b, columns, d, sums);
  for (; d < columns; ++d) {
    sums.ab += static_cast<double>(a[d]) * b[d];
    sums.aa += static_cast<double>(a[d]) * a[d];
    sums.bb += static_cast<double>(b[d]) * b[d];
  }
  return sums;
}

// d cosine / d row x the upstream gradient = other across - row own.
template <class T>
RAOE_INLINE void gradient(const T* __restrict row, const T* __restrict other, T* __restrict out, std::int64_t columns,
                          T across, T own) {
  for (std::int64_t d = 0; d < columns; ++d) out[d] = other[d] * across - row[d] * own;
}

// From a few rows' sums; 0 where a norm counts as zero.
template <class T>
RAOE_INLINE void cosines(const double* __restrict ab, const double* __restrict aa, const double* __restrict bb,
                         std::int64_t rows, double eps, T* __restrict c, T* __restrict inverse_a,
                         T* __restrict inverse_b) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const double norm_a = std::sqrt(aa[r]), norm_b = std::sqrt(bb[r]);
    const bool dead = norm_a <= eps || norm_b <= eps;
    const double over_a = 1 / norm_a, over_b = 1 / norm_b, cosine = ab[r] / (norm_a * norm_b);
    inverse_a[r] = static_cast<T>(dead ? 0 : over_a);
    inverse_b[r] = static_cast<T>(dead ? 0 : over_b);
    c[r] = static_cast<T>(dead ? 0 : cosine);
  }
}

// dc/da = b / (|a| |b|) - c a / |a|^2: a few rows' factors of b and of a, with those of wider widths.
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
  const std::int64_t useful = std::min<std::int64_t>(threads, rows * columns / elements_a_thread);
  Team team(static_cast<int>(std::max<std::int64_t>(useful, 1)));
  const std::int64_t size = team.size() == 1 ? rows : std::max<std::int64_t>(elements_a_task / columns, 1);
  team.each((rows + size - 1) / size, [&](std::int64_t k) {
    vectorised([&]() RAOE_INLINE_LAMBDA { body(k * size, std::min(rows, (k + 1) * size)); });
  });
}

// What each width of a few rows needs, side by side: (K, rows_at_once) sums or factors. A width's results lie `rows` from
// those of the next, which is often a power of two: written row by row they would fall into one set of the cache.
constexpr std::int64_t rows_at_once = 16;
struct Few {
  explicit Few(std::size_t widths) : first(widths * rows_at_once), second(first), third(first) {}
  std::vector<double> first, second, third;
};

template <class T>
void forward(const CosineArgs& args, const Dims& dims, int threads) {
  const T *const a = static_cast<const T*>(args.a), *const b = static_cast<const T*>(args.b);
  each_block(args.rows, args.columns, threads, [&](std::int64_t first, std::int64_t end) RAOE_INLINE_LAMBDA {
    Few sums(dims.size());
    for (std::int64_t r = first; r < end; r += rows_at_once) {
      const std::int64_t few = std::min(rows_at_once, end - r);
      for (std::int64_t i = 0; i < few; ++i) {
        const T *const row_a = a + (r + i) * args.stride_a, *const row_b = b + (r + i) * args.stride_b;
        Products sum;
        std::int64_t start = 0, at = i;
        for (const std::int64_t width : dims) {
          Products here = products<T>(row_a + start, row_b + start, width - start);
          // Squares of very small or large floats leave the range of float.
          if (!(here.aa > 1e-28 && here.bb > 1e-28 && here.aa + here.bb < 1e38)) {
            here = products<double>(row_a + start, row_b + start, width - start);
          }
          sum = {sum.ab + here.ab, sum.aa + here.aa, sum.bb + here.bb};
          const std::size_t to = static_cast<std::size_t>(at);
          sums.first[to] = sum.ab, sums.second[to] = sum.aa, sums.third[to] = sum.bb;
          start = width;
          at += rows_at_once;
        }
      }
      for (std::size_t k = 0; k < dims.size(); ++k) {
        const std::int64_t to = static_cast<std::int64_t>(k) * args.rows + r;
        const std::size_t from = k * rows_at_once;
        cosines(&sums.first[from], &sums.second[from], &sums.third[from], few, args.eps, static_cast<T*>(args.c) + to,
                static_cast<T*>(args.inverse_a) + to, static_cast<T*>(args.inverse_b) + to);
      }
    }
  });
}

template <class T>
void backward(const CosineGradArgs& args, const Dims& dims, int threads) {
  const T *const a = static_cast<const T*>(args.a), *const b = static_cast<const T*>(args.b);
  const T *const grad = static_cast<const T*>(args.grad), *const c = static_cast<const T*>(args.c);
  const T* const inverse_a = static_cast<const T*>(args.inverse_a);
  const T* const inverse_b = static_cast<const T*>(args.inverse_b);
  T *const grad_a = static_cast<T*>(args.grad_a), *const grad_b = static_cast<T*>(args.grad_b);
  each_block(args.rows, args.columns, threads, [&](std::int64_t first, std::int64_t end) RAOE_INLINE_LAMBDA {
    Few factors(dims.size());
    for (std::int64_t r = first; r < end; r += rows_at_once) {
      const std::int64_t few = std::min(rows_at_once, end - r);
      // A column is in every width that reaches beyond it: factors are summed from the widest on.
      for (std::size_t k = dims.size(); k-- > 0;) {
        const std::int64_t at = static_cast<std::int64_t>(k) * args.rows + r;
        const std::size_t to = k * rows_at_once, wider = k + 1 < dims.size() ? to + rows_at_once : to;
        add_factors(grad + at, c + at, inverse_a + at, inverse_b + at, few, wider != to, &factors.first[wider],
                    &factors.second[wider], &factors.third[wider], &factors.first[to], &factors.second[to],
                    &factors.third[to]);
      }
      for (std::int64_t i = 0; i < few; ++i) {
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
