// exp and acos in double without branches and function calls, so that the compiler vectorises loops that use them.
//
// T is the type in which the caller stores the result. It decides the degree of the polynomials. Their error is
// 1e-8 for float (a sixth of an ulp) and 1e-16 for double. Coefficients: near-minimax (Chebyshev) fits of
// (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2 and of (asin(s) - s) / (s z), z = s^2, on 0 <= z <= 1/4,
// computed with mpmath.chebyfit.
#pragma once

#include <cmath>
#include <cstdint>

#include "../../simd.h"
#include "../formulas.h"

namespace raoe {

template <class T>
struct Coefficients;
template <>
struct Coefficients<float> {
  static RAOE_INLINE double exp(double r) {
    return ((0x1.6d11160ec98f8p-10 * r + 0x1.120b7b19b4dc5p-7) * r + 0x1.5555192735040p-5) * (r * r) +
           (0x1.5554dcec39240p-3 * r + 0.5);
  }
  static RAOE_INLINE double asin(double z) {
    const double w = z * z;
    return ((0x1.13fed3dd245c1p-5 * z + 0x1.18f91e79712c6p-6) * w + (0x1.fd8da2554dd34p-6 * z + 0x1.6d5bb95f8e653p-5)) *
               w +
           (0x1.333430fcff28ep-4 * z + 0x1.555554e435732p-3);
  }
};
template <>
struct Coefficients<double> {
  static RAOE_INLINE double exp(double r) {
    const double w = r * r;
    double high = 0x1.af38b4925be09p-26 * r + 0x1.28918e390a71ep-22;
    high = high * w + (0x1.71de0da9d06acp-19 * r + 0x1.a019b905bafb1p-16);
    high = high * w + (0x1.a01a01a7c54aep-13 * r + 0x1.6c16c1788dc33p-10);
    high = high * w + (0x1.11111111109b2p-7 * r + 0x1.5555555553d5ep-5);
    return high * w + (0x1.5555555555556p-3 * r + 0.5);
  }
  static RAOE_INLINE double asin(double z) {
    const double w = z * z;
    double high = 0x1.cd864394d2ff2p-6 * z - 0x1.603991d6060e0p-7;
    high = high * w + (0x1.06b9d26d10838p-6 * z + 0x1.ff5fc4d14c735p-8);
    high = high * w + (0x1.8522ddffa6208p-7 * z + 0x1.c87265d47ef49p-7);
    high = high * w + (0x1.1c593c7b1d958p-6 * z + 0x1.6e8b2b3b10be4p-6);
    high = high * w + (0x1.f1c71f95269afp-6 * z + 0x1.6db6db684b6a1p-5);
    return high * w + (0x1.3333333336da5p-4 * z + 0x1.555555555554fp-3);
  }
};

// exp(x) for |x| <= 700: x = k ln 2 + r, and k is added to the exponent field.
template <class T>
RAOE_INLINE double fast_exp(double x) {
  constexpr double log2_e = 0x1.71547652b82fep0, shifter = 0x1.8p52;
  constexpr double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;  // k ln2_high is exact
  const double shifted = x * log2_e + shifter;  // its low bits are k, rounded to nearest
  const double k = shifted - shifter;
  const double r = (x - k * ln2_high) - k * ln2_low;
  const double value = 1.0 + (r + (r * r) * Coefficients<T>::exp(r));
  const std::uint64_t exponent = bits_of<std::uint64_t>(shifted) << 52;
  return bits_of<double>(bits_of<std::uint64_t>(value) + exponent);
}

// acos(c) for |c| <= 1, by asin(s) on s <= 1/2: acos|c| = 2 asin(sqrt((1 - |c|) / 2)) or pi/2 - asin|c|.
template <class T>
RAOE_INLINE double fast_acos(double c) {
  constexpr double half_pi = 0x1.921fb54442d18p0, pi = 0x1.921fb54442d18p1;
  const double a = std::fabs(c);
  const bool outer = a > 0.5;
  const double half = (1.0 - a) * 0.5, root = std::sqrt(half);  // computed always, to avoid a branch
  const double z = outer ? half : a * a, s = outer ? root : a;
  const double asin = s + s * z * Coefficients<T>::asin(z);
  const double acos = outer ? 2.0 * asin : half_pi - asin;
  return c < 0.0 ? pi - acos : acos;
}

}  // namespace raoe
