// Sums of exponentials in the linear and the log domain, and spans: partial sums of ranges of positions.
//
// Every summation tree has a fixed shape, so equal inputs give equal bits.
#pragma once

#include <cuda_runtime.h>

#include "../formulas.h"

namespace raoe {

// ---- Arithmetic of the sums: one GPU instruction each, accurate to 2 ulp. ----

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

// Whether one of the bits `which` is set. Its moves and stores take two instructions; the compiler would take more.
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

// ---- The domains. A term is exp(x), and its inverse exp(-x) is the term of the other side. Sums within a tile have
// type Part, sums over tiles type Sum, and sums that other threads read are stored as T. ----

enum : int { RANK = 1, ANGLE = 2 };

// Plain sums of floats. Hot names the objectives of a specialised version with gradient, which unrolls the loops over a
// thread's pairs and has everything in registers. With Hot = 0, the arguments select the objectives.
template <int Hot>
struct Linear {
  static constexpr int hot = Hot;
  using T = float;
  using Part = float;
  using Sum = double;
  struct Kept {  // a pair's data for its gradient
    T slope;
  };
  struct Closed {  // an objective's data for the gradient
    T share;       // 1 / (1 + Z)
  };
  // Kept values are scaled by SMALL and shares by 1 / SMALL, because shares may be below the normal numbers.
  static constexpr T SMALL = 0x1p-24f;
  static __device__ T scaled(double tau) { return static_cast<T>(tau * 1.4426950408889634); }  // base-2 exponents
  // One instruction. The rounding of tau x middle is the same in all terms and cancels in their products.
  static __device__ T exponent(T tau, T c, T middle) { return fmaf(tau, c, -(tau * middle)); }
  static __device__ T term(T exponent) { return power_of_two(exponent); }
  // exp(tau (middle - theta)), and SMALL / (tau sqrt(1 - c^2)), or 0 where clipped. theta = acos(clip(c)) is a
  // polynomial times sqrt(1 - |c|), with error 2e-8 (Abramowitz and Stegun, 4.4.46), or for negative c pi minus that.
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
  // less - p x, or for negative c more + p x.
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
  // 1 + Z may exceed float's range, so it is scaled down first.
  static __device__ Closed close(Sum z) { return {reciprocal(static_cast<T>((1 + z) * 0x1p-48)) * SMALL}; }
  static __device__ T gradient(Kept kept, Closed closed, T weight) { return kept.slope * (weight * closed.share); }
  static __device__ T rank_factor() { return SMALL; }
  static __device__ T angle_weight(double tau, double weight) { return static_cast<T>(tau * weight) * scaled(tau); }
};

// The number sum * exp(max): its logarithm stays in range even if the number does not.
template <class T>
struct LogSum {
  T max = T(-INFINITY), sum = T(0);
  LogSum() = default;
  __device__ explicit LogSum(T exponent) : max(exponent), sum(exponent == T(-INFINITY) ? T(0) : T(1)) {}
};

// Not inlined: compilers take minutes for an inlined scan of these.
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
  static __device__ T term(T exponent) {  // clamped, so that the sum of two terms is finite
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

// ---- Partial sums of a range of positions, in one direction. ----

// `sum` adds up two columns. `retained` is `sum` as it was when the range's last run began; the pairs of that run read
// it, because equal scores are not partners. If there are segments, `sum` restarts at the beginning of each.
template <class Sum, bool Segments>
struct alignas(sizeof(Sum) == 4 ? 16 : alignof(Sum)) Span {
  // Flags in `count`: a segment begins in this range; `retained` starts from a segment in this range.
  enum : std::uint32_t { SEGMENT = 1u << 30, AFRESH = 1u << 31, COUNT = SEGMENT - 1 };
  Sum rank{}, sum[2]{}, retained[2]{};
  std::uint32_t spare = 0;  // pads the span to 32 bytes if sums are floats
  std::uint32_t count = 0, edge = 0;  // edge: 1 + start of the last run (backwards: ~ its end), or 0 for no run

  Span() = default;
  template <class Other>
  __device__ __forceinline__ explicit Span(const Span<Other, Segments>& other)
      : rank(other.rank), sum{Sum(other.sum[0]), Sum(other.sum[1])},
        retained{Sum(other.retained[0]), Sum(other.retained[1])}, count(other.count), edge(other.edge) {}

  __device__ void begin_run() {
    retained[0] = sum[0], retained[1] = sum[1];
    edge = 1;
    count = (count & ~std::uint32_t(AFRESH)) | (count & SEGMENT ? AFRESH : 0);
  }
  __device__ void begin_segment() {
    sum[0] = sum[1] = Sum{};
    count |= SEGMENT;
  }
};

// Add one pair to a span whose two columns serve labels 0, 1 and 2. If the pair `begins` a run, `edge` becomes `place`.
// `not_0`: its label is 1 or 2; `is_2`: its label is 2. Returns the sum that the pair reads, that of larger labels; its
// own term is added to the columns that smaller labels read. Reverse: the other way round.
template <bool Reverse, class S, class V>
__device__ __forceinline__ V join(S& span, V term, Bit begins, Bit not_0, Bit is_2, std::uint32_t& edge, std::uint32_t place) {
  if (begins) edge = place, span.retained[0] = span.sum[0], span.retained[1] = span.sum[1];
  if (not_0 != Reverse) span.sum[0] = span.sum[0] + term;
  if (is_2 != Reverse) span.sum[1] = span.sum[1] + term;
  if (Reverse) return is_2 ? span.retained[1] : (not_0 ? span.retained[0] : V());
  return is_2 ? V() : (not_0 ? span.retained[1] : span.retained[0]);
}
#if defined(__CUDA_ARCH__)
// The same in as few instructions as possible; instructions for unused results are removed.
#define RAOE_JOIN(READ, ADD)                                                                                           \
  asm("{ .reg .pred b, s, t; .reg .b32 x; and.b32 x, %7, %8; setp.ne.b32 b, x, 0; and.b32 x, %9, %10; "                \
      "setp.ne.b32 s, x, 0; and.b32 x, %9, %11; setp.ne.b32 t, x, 0; @b mov.b32 %3, %12; @b mov.b32 %1, %4; "            \
      "@b mov.b32 %2, %5; " READ " @" ADD "s add.f32 %4, %4, %6; @" ADD "t add.f32 %5, %5, %6; }"                      \
      : "=f"(read), "+f"(span.retained[0]), "+f"(span.retained[1]), "+r"(edge), "+f"(span.sum[0]), "+f"(span.sum[1])   \
      : "f"(term), "r"(begins.bits), "r"(begins.which), "r"(not_0.bits), "r"(not_0.which), "r"(is_2.which), "r"(place))
template <bool Reverse>
__device__ __forceinline__ float join(Span<float, false>& span, float term, Bit begins, Bit not_0, Bit is_2,
                                      std::uint32_t& edge, std::uint32_t place) {
  float read;
  if (Reverse) RAOE_JOIN("selp.f32 %0, %1, 0f00000000, s; selp.f32 %0, %2, %0, t;", "!");
  else RAOE_JOIN("selp.f32 %0, %2, %1, s; selp.f32 %0, 0f00000000, %0, t;", "");
  return read;
}
#undef RAOE_JOIN
#endif

// Joins the span of a with the span b of the positions that follow.
template <class Sum, bool Segments>
__device__ __forceinline__ Span<Sum, Segments> operator+(const Span<Sum, Segments>& a, const Span<Sum, Segments>& b) {
  using S = Span<Sum, Segments>;
  const bool run = b.edge != 0, fresh = Segments && (b.count & S::AFRESH), cut = Segments && (b.count & S::SEGMENT);
  S all;
  all.rank = a.rank + b.rank;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    all.sum[k] = cut ? b.sum[k] : a.sum[k] + b.sum[k];
    all.retained[k] = !run ? a.retained[k] : (fresh ? b.retained[k] : a.sum[k] + b.retained[k]);
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

// Z of both objectives.
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

// Ranges of similarity and labels, and whether an input is NaN.
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
