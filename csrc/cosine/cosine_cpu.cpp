// Pairwise cosine on the CPU: each row is read once in forward; in backward each row is read and written
// once.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "../simd.h"
#include "../team.h"
#include "cosine.h"

namespace raoe {
namespace {

constexpr std::int64_t elements_a_task = 1 << 15;
constexpr std::int64_t elements_a_thread = 1 << 17;  // fewer do not pay for starting one

struct Products {
  double ab, aa, bb;
};

// Sums in W. Floats take 32 lanes, which are joined in double; so an error grows with columns / 32.
template <class W, class T>
RAOE_INLINE Products products(const T* __restrict a, const T* __restrict b, std::int64_t columns) {
  constexpr int lanes = 32;
  W ab[lanes] = {}, aa[lanes] = {}, bb[lanes] = {};
  std::int64_t d = 0;
  for (; d + lanes <= columns; d += lanes) {
    for (int k = 0; k < lanes; ++k) {
      const W x = a[d + k], y = b[d + k];
      ab[k] += x * y;
      aa[k] += x * x;
      bb[k] += y * y;
    }
  }
  Products sums{0, 0, 0};
  for (int k = 0; k < lanes; ++k) {
    sums.ab += ab[k];
    sums.aa += aa[k];
    sums.bb += bb[k];
  }
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

template <class T>
void forward(const CosineArgs& args, int threads) {
  const T *const a = static_cast<const T*>(args.a), *const b = static_cast<const T*>(args.b);
  T* const c = static_cast<T*>(args.c);
  T *const inverse_a = static_cast<T*>(args.inverse_a), *const inverse_b = static_cast<T*>(args.inverse_b);
  each_block(args.rows, args.columns, threads, [&](std::int64_t first, std::int64_t end) RAOE_INLINE_LAMBDA {
    for (std::int64_t r = first; r < end; ++r) {
      const T *const row_a = a + r * args.stride_a, *const row_b = b + r * args.stride_b;
      Products sums = products<T>(row_a, row_b, args.columns);
      // Squares of very small or large floats leave the range of float.
      if (!(sums.aa > 1e-28 && sums.bb > 1e-28 && sums.aa + sums.bb < 1e38)) {
        sums = products<double>(row_a, row_b, args.columns);
      }
      const double norm_a = std::sqrt(sums.aa), norm_b = std::sqrt(sums.bb);
      const bool dead = norm_a <= args.eps || norm_b <= args.eps;
      inverse_a[r] = static_cast<T>(dead ? 0 : 1 / norm_a);
      inverse_b[r] = static_cast<T>(dead ? 0 : 1 / norm_b);
      c[r] = static_cast<T>(dead ? 0 : sums.ab / norm_a / norm_b);
    }
  });
}

template <class T>
void backward(const CosineGradArgs& args, int threads) {
  const T *const a = static_cast<const T*>(args.a), *const b = static_cast<const T*>(args.b);
  const T *const grad = static_cast<const T*>(args.grad), *const c = static_cast<const T*>(args.c);
  const T* const inverse_a = static_cast<const T*>(args.inverse_a);
  const T* const inverse_b = static_cast<const T*>(args.inverse_b);
  T *const grad_a = static_cast<T*>(args.grad_a), *const grad_b = static_cast<T*>(args.grad_b);
  each_block(args.rows, args.columns, threads, [&](std::int64_t first, std::int64_t end) RAOE_INLINE_LAMBDA {
    for (std::int64_t r = first; r < end; ++r) {
      // dc/da = b / (|a| |b|) - c a / |a|^2
      const double ia = inverse_a[r], ib = inverse_b[r], along = static_cast<double>(grad[r]) * c[r];
      const T across = static_cast<T>(grad[r] * ia * ib);
      const T own_a = static_cast<T>(along * ia * ia), own_b = static_cast<T>(along * ib * ib);
      const T *const row_a = a + r * args.stride_a, *const row_b = b + r * args.stride_b;
      if (grad_a) gradient(row_a, row_b, grad_a + r * args.columns, args.columns, across, own_a);
      if (grad_b) gradient(row_b, row_a, grad_b + r * args.columns, args.columns, across, own_b);
    }
  });
}

}  // namespace

void cosine_cpu(const CosineArgs& args, int threads) {
  if (args.type == Float::f64) return forward<double>(args, threads);
  if (args.type == Float::f32) return forward<float>(args, threads);
  throw std::invalid_argument("rows must be float32 or float64");
}

void cosine_grad_cpu(const CosineGradArgs& args, int threads) {
  if (args.type == Float::f64) return backward<double>(args, threads);
  if (args.type == Float::f32) return backward<float>(args, threads);
  throw std::invalid_argument("rows must be float32 or float64");
}

}  // namespace raoe
