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
#else
inline float power_of_two(float x) { return exp2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
#endif

// acos(clip(c)); float: sqrt(1 - |c|) times a polynomial, good to 2e-8 (Abramowitz and Stegun, 4.4.46).
__device__ __forceinline__ double quick_angle(double c) { return angle(c); }
__device__ __forceinline__ float quick_angle(float c) {
  const float bound = clip_bound<float>(), clipped = fminf(fmaxf(c, -bound), bound), a = fabsf(clipped), rest = 1 - a;
  float p = fmaf(-0.0012624911f, a, 0.0066700901f);
  p = fmaf(p, a, -0.0170881256f);
  p = fmaf(p, a, 0.0308918810f);
  p = fmaf(p, a, -0.0501743046f);
  p = fmaf(p, a, 0.0889789874f);
  p = fmaf(p, a, -0.2145988016f);
  p = fmaf(p, a, 1.5707963050f) * (rest * inverse_root(rest));
  return clipped < 0 ? 3.14159265f - p : p;
}

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
    T root;        // 1 / (1 + Z) in two factors, for it may be below the normal numbers
  };
  static __device__ T scaled(double tau) { return static_cast<T>(tau * 1.4426950408889634); }  // exponents of 2
  // In one instruction. The rounding of tau x middle is in all terms alike, and leaves their products.
  static __device__ T exponent(T tau, T c, T middle) { return fmaf(tau, c, -(tau * middle)); }
  static __device__ T term(T exponent) { return power_of_two(exponent); }
  static __device__ T inverse(T term) { return reciprocal(term); }
  static __device__ T nothing() { return 0; }
  static __device__ T value(Part sum) { return sum; }
  static __device__ T plus(T a, T b) { return a + b; }
  static __device__ T product(T a, T b) { return a * b; }
  static __device__ Kept kept(T term, T below, T above, T factor) {
    return {factor * (term * above - reciprocal(term) * below)};
  }
  static __device__ T loss(Sum z) { return static_cast<T>(log1p(z)); }
  static __device__ Closed close(Sum z) { return {static_cast<T>(inverse_root(1 + z))}; }
  static __device__ T gradient(Kept kept, Closed closed, T weight) {
    return kept.slope * closed.root * (weight * closed.root);
  }
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
  static __device__ T inverse(T term) { return -term; }
  static __device__ T nothing() { return T(-INFINITY); }
  static __device__ T value(Part sum) { return sum.max + log(sum.sum); }
  static __device__ T plus(T a, T b) { return value(Part(a) + Part(b)); }
  static __device__ T product(T a, T b) { return a + b; }
  static __device__ Kept kept(T term, T below, T above, T factor) { return {below - term, above + term, factor}; }
  static __device__ T loss(Sum z) { return softplus(value(z)); }
  static __device__ Closed close(Sum z) { return {loss(z)}; }
  static __device__ T gradient(Kept kept, Closed closed, T weight) {
    return weight * kept.factor * (exp(kept.above - closed.loss) - exp(kept.below - closed.loss));
  }
};

// ---- A range of positions, summed up in one direction. ----

// `sum` counts what stands in two columns; `held` is what `sum` was where the last run in the range began, which is
// what its pairs read: equal scores are no partners. Where a segment begins, if there are any, `sum` starts again.
template <class Sum, bool Segments>
struct Span {
  // In `count`, above what is counted: a segment begins in here; `held` counts from a segment in here.
  enum : std::uint32_t { SEGMENT = 1u << 30, AFRESH = 1u << 31, COUNT = SEGMENT - 1 };
  Sum rank{}, sum[2]{}, held[2]{};
  std::uint32_t count = 0, edge = 0;  // edge: 1 + where the last run begins, backwards ~ where it ends; 0: none does

  Span() = default;
  template <class Other>
  __device__ __forceinline__ explicit Span(const Span<Other, Segments>& other)
      : rank(other.rank), sum{Sum(other.sum[0]), Sum(other.sum[1])}, held{Sum(other.held[0]), Sum(other.held[1])},
        count(other.count), edge(other.edge) {}

  __device__ __forceinline__ void hold(bool begins) {
    held[0] = begins ? sum[0] : held[0];
    held[1] = begins ? sum[1] : held[1];
  }
  __device__ void begin_run() {
    hold(true);
    edge = 1;
    count = (count & ~std::uint32_t(AFRESH)) | (count & SEGMENT ? AFRESH : 0);
  }
  __device__ void begin_segment() {
    sum[0] = sum[1] = Sum{};
    count |= SEGMENT;
  }
};

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

// ---- Across a warp and a block. `shared` holds one V a warp and one more; all threads of the block call. ----

template <class V, class Move>
__device__ __forceinline__ V by_words(V value, Move move) {
  static_assert(sizeof(V) % 4 == 0, "whole words");
  std::uint32_t words[sizeof(V) / 4];
  memcpy(words, &value, sizeof(V));
#pragma unroll
  for (std::uint32_t& word : words) word = move(word);
  memcpy(&value, words, sizeof(V));
  return value;
}

// The value of the lane `distance` places earlier in the direction of the scan.
template <bool Reverse, class V>
__device__ __forceinline__ V from_earlier(V value, int distance) {
  return by_words(value, [&](std::uint32_t word) {
    return Reverse ? __shfl_down_sync(0xffffffffu, word, distance) : __shfl_up_sync(0xffffffffu, word, distance);
  });
}

template <bool Reverse, int Lanes, class V>
__device__ __forceinline__ V warp_inclusive(V value, int lane) {
#pragma unroll
  for (int distance = 1; distance < Lanes; distance *= 2) {
    const V earlier = from_earlier<Reverse>(value, distance);
    if (Reverse ? lane + distance < Lanes : lane >= distance) value = earlier + value;
  }
  return value;
}

// The sum over the threads before this one (Reverse: behind it), and the sum over all of them.
template <bool Reverse, int Block, class V>
__device__ __forceinline__ V block_exclusive(V value, V* shared, V& total) {
  constexpr int warps = Block / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  value = warp_inclusive<Reverse, 32>(value, lane);
  V before = from_earlier<Reverse>(value, 1);
  if (lane == (Reverse ? 31 : 0)) before = V();
  if (lane == (Reverse ? 0 : 31)) shared[warp] = value;
  __syncthreads();
  if (warp == 0) {
    const V all = warp_inclusive<Reverse, warps>(lane < warps ? shared[lane] : V(), lane);
    V earlier = from_earlier<Reverse>(all, 1);
    if (lane == (Reverse ? warps - 1 : 0)) earlier = V();
    if (lane == (Reverse ? 0 : warps - 1)) shared[warps] = all;
    if (lane < warps) shared[lane] = earlier;
  }
  __syncthreads();
  total = shared[warps];
  before = shared[warp] + before;
  __syncthreads();
  return before;
}

// The same, as a call: its code is long where sums are logarithms.
template <bool Reverse, int Block, class V>
__device__ __noinline__ V block_exclusive_apart(V value, V* shared, V& total) {
  return block_exclusive<Reverse, Block>(value, shared, total);
}

// The sum over the block, in every thread.
template <int Block, class V>
__device__ V block_sum(V value, V* shared) {
  constexpr int warps = Block / 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int distance = 16; distance; distance /= 2) value = value + from_earlier<true>(value, distance);
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = shared[0];
  for (int other = 1; other < warps; ++other) value = value + shared[other];
  __syncthreads();
  return value;
}

// ---- Items neighbours in memory, 16 bytes at once. ----

template <class V, int Items>
struct alignas(sizeof(V) * Items < 16 ? sizeof(V) * Items : 16) Neighbours {
  V at[Items];
};

}  // namespace raoe
