// Formulas of the pairwise losses, for host and device.
//
// Positions refer to the pairs sorted by score. A run is a maximal range of equal scores: `first` and `last` are
// its first and last position, and `index` is the number of earlier runs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "pairwise.h"

namespace raoe {

// ---- Scores as unsigned integers in the same order; -0.0 and 0.0 have the same key. ----

template <class To, class From>
RAOE_HD To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit pattern keeps its size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

RAOE_HD bool is_nan(float x) { return x != x; }
RAOE_HD bool is_nan(double x) { return x != x; }
RAOE_HD bool is_nan(std::int64_t) { return false; }

// Flip all bits of a negative number, and only the sign bit of a positive one. Adding 0 turns -0.0 into 0.0. NaN may
// get any key, because callers test for NaN.
RAOE_HD std::uint32_t orderable(float score) {
  const std::int32_t bits = bits_of<std::int32_t>(score + 0.0f);
  return static_cast<std::uint32_t>(bits ^ ((bits >> 31) | INT32_MIN));
}
RAOE_HD std::uint64_t orderable(double score) {
  const std::int64_t bits = bits_of<std::int64_t>(score + 0.0);
  return static_cast<std::uint64_t>(bits ^ ((bits >> 63) | INT64_MIN));
}
RAOE_HD std::uint64_t orderable(std::int64_t score) { return static_cast<std::uint64_t>(score ^ INT64_MIN); }

// ---- Ranks, counted from 0. Twice a rank is an integer under every tie rule and never decreases with the position.
// Int: 64 bits, or 32 bits if 2 n fits.

template <class Int>
RAOE_HD Int doubled_rank(Ties ties, Int position, Int first, Int last, Int index) {
  if (ties == Ties::dense) return 2 * index;
  if (ties == Ties::ordinal) return 2 * position;
  return (ties == Ties::max ? last : first) + (ties == Ties::min ? first : last);  // average: first + last
}

// ---- The angle. ----

template <class T>
RAOE_HD T clip_bound() {
  // Computed in T, so that every backend clips the same values.
  return T(1) - T(1e-6);
}

// Return whether c is neither clipped nor NaN.
template <class T>
RAOE_HD bool inside_clip(T c) {
  return c > -clip_bound<T>() && c < clip_bound<T>();
}

template <class T>
RAOE_HD T clip(T c) {
  const T bound = clip_bound<T>();
  return c < -bound ? -bound : (c > bound ? bound : c);  // NaN stays NaN
}

template <class T>
RAOE_HD T angle(T c) {
  using std::acos;
  return acos(clip(c));
}

RAOE_HD double inverse_root(double x) { return 1 / std::sqrt(x); }
RAOE_HD float inverse_root(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));  // accurate to 2 ulp
  return y;
#else
  return 1 / std::sqrt(x);
#endif
}

// d(-theta)/dc = 1 / sqrt(1 - c^2), or 0 where c is clipped. (1 - c)(1 + c) is accurate near +-1.
template <class T>
RAOE_HD T angle_slope(T c) {
  return inside_clip(c) ? inverse_root((T(1) - c) * (T(1) + c)) : T(0);
}

// ---- The sums. ----

// Sums of exponentials are stored as plain numbers if tau x range(c) and tau x range(theta) are below this bound.
// Then a sum of n terms exp(range) fits into float (`single`). With terms in double, even the largest Z fits.
inline double linear_room(bool single, std::int64_t n) {
  const double count = std::log(static_cast<double>(n));
  return single ? 85 - count : 680 - 2 * count;
}

// log(1 + Z) from log Z; exactly 0 at -inf.
template <class T>
RAOE_HD T softplus(T log_z) {
  using std::exp;
  using std::log1p;
  return log_z > T(0) ? log_z + log1p(exp(-log_z)) : log1p(exp(log_z));
}

}  // namespace raoe
