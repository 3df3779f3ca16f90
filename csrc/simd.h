// Run-time choice of the instruction set: a loop is compiled for each set, and the CPU's features select a version.
//
//     vectorised([&]() RAOE_INLINE_LAMBDA { loop(...); });
//
// Everything that the lambda calls in its loops must be RAOE_INLINE, so that it is compiled for the same set.
// This file does not depend on ifunc or target_clones, so it also builds with clang, on musl and on other
// architectures.
#pragma once

// RAOE_NOINLINE: for hot loops that would run out of registers if they were inlined among many variables.
#if defined(__GNUC__)
#define RAOE_INLINE inline __attribute__((always_inline))
#define RAOE_INLINE_LAMBDA __attribute__((always_inline))
#define RAOE_NOINLINE __attribute__((noinline))
#else
#define RAOE_NOINLINE
#define RAOE_INLINE inline
#define RAOE_INLINE_LAMBDA
#endif

#if defined(__GNUC__) && defined(__x86_64__) && !defined(RAOE_SIMD_BASELINE)
#define RAOE_SIMD_DISPATCH 1
#endif

namespace raoe {

// Make the compiler assume that memory has changed, so that it loads whole vectors instead of joining scalars.
RAOE_INLINE void forget([[maybe_unused]] const void* memory) {
#if defined(__GNUC__)
  __asm__ volatile("" : : "r"(memory) : "memory");
#endif
}

#if defined(RAOE_SIMD_DISPATCH)
#define RAOE_AVX2 "avx2,fma"
#define RAOE_AVX512 "avx2,fma,avx512f,avx512dq,avx512bw,avx512vl"

template <class Body>
__attribute__((noinline, target(RAOE_AVX2))) void with_avx2(const Body& body) {
  body();
}
template <class Body>
__attribute__((noinline, target(RAOE_AVX512))) void with_avx512(const Body& body) {
  body();
}

enum class Simd { baseline, avx2, avx512 };

inline Simd simd() {
  static const Simd level = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    return avx2 && avx512 ? Simd::avx512 : avx2 ? Simd::avx2 : Simd::baseline;
  }();
  return level;
}
#endif

template <class Body>
inline void vectorised(const Body& body) {
#if defined(RAOE_SIMD_DISPATCH)
  switch (simd()) {
    case Simd::avx512: return with_avx512(body);
    case Simd::avx2: return with_avx2(body);
    case Simd::baseline: break;
  }
#endif
  body();
}

}  // namespace raoe
