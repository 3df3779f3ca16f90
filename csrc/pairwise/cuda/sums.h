// Sums of exponentials in their two domains, and how a thread block scans and reduces.
//
// Every tree has a fixed shape, so equal inputs give equal bits.
#pragma once

#include <cuda_runtime.h>

#include "../formulas.h"

namespace raoe {

// ---- What the sums need of arithmetic, in one GPU instruction each, good to 2 ulp. ----

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float root(float x) {
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else
inline float power_of_two(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float root(float x) { return std::sqrt(x); }
#endif

// Whether one of some bits is set. What depends on it takes two instructions, where the compiler makes more of it.
struct Bit {
  std::uint32_t bits, which;
  __device__ operator bool() const { return (bits & which) != 0; }
#if defined(__CUDA_ARCH__)
  __device__ __forceinline__ void move(float& to, float value) const {
    asm("{ .reg .pred p; .reg .b32 x; and.b32 x, %1, %2; setp.ne.b32 p, x, 0; @p mov.b32 %0, %3; }"
        : "+f"(to) : "r"(bits), "r"(which), "f"(value));
  }
  __device__ __forceinline__ void store(float* to, float value) const {
    asm volatile("{ .reg .pred p; .reg .b32 x; and.b32 x, %1, %2; setp.ne.b32 p, x, 0; @p st.global.f32 [%0], %3; }"
                 :: "l"(to), "r"(bits), "r"(which), "f"(value) : "memory");
  }
#endif
  template <class V>
  __device__ __forceinline__ void move(V& to, const V& value) const { if (*this) to = value; }
  template <class V>
  __device__ __forceinline__ void store(V* to, V value) const { if (*this) *to = value; }
};

// ---- The domains. A term is exp(x), its inverse exp(-x) the other side's. A tile adds up Parts, all tiles Sums; what
// is read elsewhere is kept as a T. ----

enum : int { RANK = 1, ANGLE = 2 };

// Of floats. Hot are exactly these objectives, with their gradient: loops over a thread's pairs are unrolled, everything
// is in registers. 0: the arguments say which.
template <int Hot>
struct Linear {
  static constexpr int hot = Hot;
  using T = float;
  using Part = float;
  using Sum = double;
  struct Kept {  // of a pair, for its gradient
    T slope;
  };
  struct Closed {  // of an objective
    T share;       // 1 / (1 + Z)
  };
  // What is kept is less by SMALL, and shares are more: they may be below the normal numbers.
  static constexpr T SMALL = 0x1p-24f;
  static __device__ T scaled(double tau) { return static_cast<T>(tau * 1.4426950408889634); }  // exponents of 2
  // In one instruction. The rounding of tau x middle is in all terms alike, and leaves their products.
  static __device__ T exponent(T tau, T c, T middle) { return fmaf(tau, c, -(tau * middle)); }
  static __device__ T term(T exponent) { return power_of_two(exponent); }
  // exp(tau (middle - theta)), and SMALL / tau sqrt(1 - c^2), or 0 where the clip is active. theta = acos(clip(c)) is
  // sqrt(1 - |c|) times a polynomial, good to 2e-8 (Abramowitz and Stegun, 4.4.46), or pi less that.
  static __device__ __forceinline__ void angle_terms(T c, T tau, T middle, T& term, T& slope) {
    const T a = fminf(fabsf(c), clip_bound<T>()), square = tau * tau / (SMALL * SMALL), rest = fmaf(-square, a, square);
    T p = fmaf(-0.0012624911f * SMALL, a, 0.0066700901f * SMALL);
    p = fmaf(p, a, -0.0170881256f * SMALL);
    p = fmaf(p, a, 0.0308918810f * SMALL);
    p = fmaf(p, a, -0.0501743046f * SMALL);
    p = fmaf(p, a, 0.0889789874f * SMALL);
    p = fmaf(p, a, -0.2145988016f * SMALL);
    p = fmaf(p, a, 1.5707963050f * SMALL);
    term = power_of_two(either(c, p, root(rest), tau * middle, tau * (middle - 3.14159265f)));
    slope = fabsf(c) < clip_bound<T>() ? inverse_root(fmaf(rest, a, rest)) : T(0);
  }
  // less - p x, of a negative c more + p x.
  static __device__ __forceinline__ T either(T c, T p, T x, T less, T more) {
#if defined(__CUDA_ARCH__)
    T result;
    asm("{ .reg .pred q; .reg .f32 m; setp.lt.f32 q, %1, 0f00000000; neg.f32 m, %2; fma.rn.f32 %0, m, %3, %4; "
        "@q fma.rn.f32 %0, %2, %3, %5; }"
        : "=&f"(result) : "f"(c), "f"(p), "f"(x), "f"(less), "f"(more));
    return result;
#else
    return c < 0 ? fmaf(p, x, more) : fmaf(-p, x, less);
#endif
  }
  static __device__ T inverse(T term) { return reciprocal(term); }
  static __device__ T nothing() { return 0; }
  static __device__ T value(Part sum) { return sum; }
  static __device__ T plus(T a, T b) { return a + b; }
  static __device__ T product(T a, T b) { return a * b; }
  static __device__ Kept kept(T term, T below, T above, T factor) {
    return {factor * (term * above - reciprocal(term) * below)};
  }
  static __device__ T loss(Sum z) { return static_cast<T>(log1p(z)); }
  // Z may be beyond float's range.
  static __device__ Closed close(Sum z) { return {reciprocal(static_cast<T>((1 + z) * 0x1p-48)) * SMALL}; }
  static __device__ T gradient(Kept kept, Closed closed, T weight) { return kept.slope * (weight * closed.share); }
  static __device__ T rank_factor() { return SMALL; }
  static __device__ T angle_weight(double tau, double weight) { return static_cast<T>(tau * weight) * scaled(tau); }
};

// The number sum * exp(max), whose logarithm stays in range where the number does not.
template <class T>
struct LogSum {
  T max = T(-INFINITY), sum = T(0);
  LogSum() = default;
  __device__ explicit LogSum(T exponent) : max(exponent), sum(exponent == T(-INFINITY) ? T(0) : T(1)) {}
};

// A call: the compilers take minutes over an inlined scan of these.
template <class T>
__device__ __noinline__ LogSum<T> operator+(LogSum<T> a, LogSum<T> b) {
  if (a.max < b.max) {
    const LogSum<T> larger = b;
    b = a;
    a = larger;
  }
  if (b.max == T(-INFINITY)) return a;  // -inf - -inf would be NaN
  a.sum += b.sum * exp(b.max - a.max);
  return a;
}

template <class T>
struct Log {
  static constexpr int hot = 0;
  using Part = LogSum<T>;
  using Sum = LogSum<T>;
  struct Kept {
    T below, above, factor;  // exponents
  };
  struct Closed {
    T loss;
  };
  static __device__ T scaled(double tau) { return static_cast<T>(tau); }
  static __device__ T exponent(T tau, T c, T middle) { return tau * (c - middle); }
  static __device__ T term(T exponent) {  // sums of two of them are finite
    constexpr T most = sizeof(T) == 4 ? T(8e37) : T(4e307);
    return exponent > most ? most : (exponent < -most ? -most : exponent);
  }
  static __device__ void angle_terms(T c, T tau, T middle, T& term, T& slope) {
    term = Log::term(exponent(-tau, angle(c), middle));
    slope = angle_slope(c);
  }
  static __device__ T inverse(T term) { return -term; }
  static __device__ T nothing() { return T(-INFINITY); }
  static __device__ T value(Part sum) { return sum.max + log(sum.sum); }
  static __device__ T plus(T a, T b) { return value(Part(a) + Part(b)); }
  static __device__ T product(T a, T b) { return a + b; }
  static __device__ Kept kept(T term, T below, T above, T factor) { return {below - term, above + term, factor}; }
  static __device__ T loss(Sum z) { return softplus(value(z)); }
  static __device__ Closed close(Sum z) { return {loss(z)}; }
  static __device__ T rank_factor() { return 1; }
  static __device__ T angle_weight(double tau, double weight) { return static_cast<T>(tau * weight); }
  static __device__ T gradient(Kept kept, Closed closed, T weight) {
    return weight * kept.factor * (exp(kept.above - closed.loss) - exp(kept.below - closed.loss));
  }
};

// ---- A range of positions, summed up in one direction. ----

// `sum` counts what stands in two columns; `held` is what `sum` was where the last run in the range began, which is
// what its pairs read: equal scores are no partners. Where a segment begins, if there are any, `sum` starts again.
template <class Sum, bool Segments>
struct alignas(sizeof(Sum) == 4 ? 16 : alignof(Sum)) Span {
  // In `count`, above what is counted: a segment begins in here; `held` counts from a segment in here.
  enum : std::uint32_t { SEGMENT = 1u << 30, AFRESH = 1u << 31, COUNT = SEGMENT - 1 };
  Sum rank{}, sum[2]{}, held[2]{};
  std::uint32_t spare = 0;  // of 32 bytes, where sums are floats
  std::uint32_t count = 0, edge = 0;  // edge: 1 + where the last run begins, backwards ~ where it ends; 0: none does

  Span() = default;
  template <class Other>
  __device__ __forceinline__ explicit Span(const Span<Other, Segments>& other)
      : rank(other.rank), sum{Sum(other.sum[0]), Sum(other.sum[1])}, held{Sum(other.held[0]), Sum(other.held[1])},
        count(other.count), edge(other.edge) {}

  __device__ void begin_run() {
    held[0] = sum[0], held[1] = sum[1];
    edge = 1;
    count = (count & ~std::uint32_t(AFRESH)) | (count & SEGMENT ? AFRESH : 0);
  }
  __device__ void begin_segment() {
    sum[0] = sum[1] = Sum{};
    count |= SEGMENT;
  }
};

// One pair joins a span of two columns of labels 0, 1 and 2: `begins` a run, where `edge` becomes `place`; its label is
// `some`, 1 or 2, or `second`, 2. Returns what it reads: forwards the terms of larger labels, and its own joins the
// columns of smaller ones; Reverse: the other way round.
template <bool Reverse, class S, class V>
__device__ __forceinline__ V join(S& span, V term, Bit begins, Bit some, Bit second, std::uint32_t& edge, std::uint32_t place) {
  if (begins) edge = place, span.held[0] = span.sum[0], span.held[1] = span.sum[1];
  if (some != Reverse) span.sum[0] = span.sum[0] + term;
  if (second != Reverse) span.sum[1] = span.sum[1] + term;
  if (Reverse) return second ? span.held[1] : (some ? span.held[0] : V());
  return second ? V() : (some ? span.held[1] : span.held[0]);
}
#if defined(__CUDA_ARCH__)
// In as few instructions as there are; what a caller does not use is none.
#define RAOE_JOIN(READ, ADD)                                                                                           \
  asm("{ .reg .pred b, s, t; .reg .b32 x; and.b32 x, %7, %8; setp.ne.b32 b, x, 0; and.b32 x, %9, %10; "                \
      "setp.ne.b32 s, x, 0; and.b32 x, %9, %11; setp.ne.b32 t, x, 0; @b mov.b32 %3, %12; @b mov.b32 %1, %4; "            \
      "@b mov.b32 %2, %5; " READ " @" ADD "s add.f32 %4, %4, %6; @" ADD "t add.f32 %5, %5, %6; }"                      \
      : "=f"(read), "+f"(span.held[0]), "+f"(span.held[1]), "+r"(edge), "+f"(span.sum[0]), "+f"(span.sum[1])           \
      : "f"(term), "r"(begins.bits), "r"(begins.which), "r"(some.bits), "r"(some.which), "r"(second.which), "r"(place))
template <bool Reverse>
__device__ __forceinline__ float join(Span<float, false>& span, float term, Bit begins, Bit some, Bit second,
                                      std::uint32_t& edge, std::uint32_t place) {
  float read;
  if (Reverse) RAOE_JOIN("selp.f32 %0, %1, 0f00000000, s; selp.f32 %0, %2, %0, t;", "!");
  else RAOE_JOIN("selp.f32 %0, %2, %1, s; selp.f32 %0, 0f00000000, %0, t;", "");
  return read;
}
#undef RAOE_JOIN
#endif

// a, then b.
template <class Sum, bool Segments>
__device__ __forceinline__ Span<Sum, Segments> operator+(const Span<Sum, Segments>& a, const Span<Sum, Segments>& b) {
  using S = Span<Sum, Segments>;
  const bool run = b.edge != 0, fresh = Segments && (b.count & S::AFRESH), cut = Segments && (b.count & S::SEGMENT);
  S all;
  all.rank = a.rank + b.rank;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    all.sum[k] = cut ? b.sum[k] : a.sum[k] + b.sum[k];
    all.held[k] = !run ? a.held[k] : (fresh ? b.held[k] : a.sum[k] + b.held[k]);
  }
  all.edge = a.edge < b.edge ? b.edge : a.edge;
  all.count = a.count + b.count;
  if (Segments) {
    const std::uint32_t segment = (a.count | b.count) & S::SEGMENT;
    const bool afresh = run ? fresh || (a.count & S::SEGMENT) : (a.count & S::AFRESH) != 0;
    all.count = ((a.count & S::COUNT) + (b.count & S::COUNT)) | segment | (afresh ? S::AFRESH : 0);
  }
  return all;
}

// Z of the two objectives.
template <class Sum>
struct alignas(2 * sizeof(Sum) < 16 ? 2 * sizeof(Sum) : 16) Both {
  Sum rank{}, angle{};

  Both() = default;
  template <class Other>
  __device__ __forceinline__ explicit Both(const Both<Other>& other) : rank(other.rank), angle(other.angle) {}
};
template <class Sum>
__device__ __forceinline__ Both<Sum> operator+(Both<Sum> a, const Both<Sum>& b) {
  a.rank = a.rank + b.rank, a.angle = a.angle + b.angle;
  return a;
}

// What the inputs are like.
template <class T>
struct Extent {
  T low = T(INFINITY), high = T(-INFINITY);
  std::int64_t label_low = INT64_MAX, label_high = INT64_MIN, nan = 0;
};

template <class T>
__device__ __forceinline__ Extent<T> operator+(Extent<T> a, const Extent<T>& b) {
  a.low = fmin(a.low, b.low);
  a.high = fmax(a.high, b.high);
  a.label_low = b.label_low < a.label_low ? b.label_low : a.label_low;
  a.label_high = b.label_high > a.label_high ? b.label_high : a.label_high;
  a.nan |= b.nan;
  return a;
}

}  // namespace raoe
