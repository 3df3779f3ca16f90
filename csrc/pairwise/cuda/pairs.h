// How to read the pairs of a tile, and the data that threads hold and blocks share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../formulas.h"
#include "scan.h"

namespace raoe {

constexpr int LABEL_SHIFT = 30;  // a payload is index | low bits of the label << 30
__device__ __forceinline__ std::uint32_t index_of(std::uint32_t pair) { return pair & ((1u << LABEL_SHIFT) - 1); }

template <class T>
__device__ __forceinline__ T load(const void* data, Float type, std::uint32_t i) {
  switch (type) {
    case Float::f32: return T(static_cast<const float*>(data)[i]);
    case Float::f64: return T(static_cast<const double*>(data)[i]);
    case Float::f16: return T(__half2float(static_cast<const __half*>(data)[i]));
    default: return T(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]));
  }
}

// Load a score as an unsigned integer of the same order, and set `nan` if it is NaN.
template <class Bits>
__device__ __forceinline__ Bits load_key(const void* data, Key type, std::uint32_t i, bool& nan) {
  if (type == Key::f32) {
    const float score = static_cast<const float*>(data)[i];
    nan |= is_nan(score);
    return orderable(score);
  }
  if (type == Key::f64) {
    const double score = static_cast<const double*>(data)[i];
    nan |= is_nan(score);
    return static_cast<Bits>(orderable(score));
  }
  return static_cast<Bits>(orderable(static_cast<const std::int64_t*>(data)[i]));
}

// Ranges of similarities and labels, and whether a similarity or a score is NaN.
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

// Read pair i: return its similarity, set its sort key and payload (`pair`), and add the pair to `extent`.
template <class Bits, class T>
__device__ __forceinline__ T read_pair(const PairwiseArgs& args, std::uint32_t i, Bits& key, std::uint32_t& pair,
                                       Extent<T>& extent) {
  bool nan = false;
  key = load_key<Bits>(args.scores, args.score_type, i, nan);
  const T similarity = load<T>(args.similarity, args.similarity_type, i);
  Extent<T> own{similarity, similarity};
  pair = i;
  if (args.labels) {
    own.label_low = own.label_high = args.labels[i];
    pair |= static_cast<std::uint32_t>(own.label_low) << LABEL_SHIFT;
  }
  own.nan = nan || is_nan(similarity);
  extent = extent + own;
  return similarity;
}

// Consecutive elements in memory, moved 16 bytes at a time.
template <class V, int Count>
struct alignas(sizeof(V) * Count < 16 ? sizeof(V) * Count : 16) Neighbours {
  V at[Count];
};

// Arrays with one element per position. Arrays of hot.h have room for whole tiles, and start at multiples of 16 bytes.
template <class T, class Index>
struct Arrays {
  T *before, *after;         // rank objective: sums before a position, and from a position on (n + 1)
  Index* ends;               // hot.h: ends[b] is the number of positions whose doubled rank is <= b; b >= -1
  // The following arrays are for general.h.
  Index *rank, *run;         // doubled rank; number of earlier runs
  std::uint64_t* label;      // label minus the smallest label
  T *term, *below, *above;   // angular objective: the pair's exponent, and its partners' sums
  Index* order[2];           // positions in the order of this bit and of the next bit
};
constexpr std::size_t ENDS_AHEAD = 16;  // bytes before ends[0], so that stores to ends stay 16-byte aligned

// Data for a launch of several blocks.
template <class T>
struct Crossing {
  const void* keys;            // sorted keys
  const std::uint32_t* pairs;  // payloads, in the order of the keys
  const T* similarity;         // in the caller's order
  std::uint32_t n, tiles;
  bool wide;                   // whether keys have 64 bits
  unsigned char* spans;        // (2, tiles + 1): forwards and backwards, the span of each tile, then of all tiles
  unsigned char* joined;       // (blocks) each block's Z, as Both
  unsigned* arrived;           // number of blocks at the barrier; initially 0
};
constexpr std::size_t SPAN_BYTES = 48, BOTH_BYTES = 32;  // sizes of the largest span and Both

// A thread's part of a tile.
template <class T, int Items>
struct ThreadTile {
  std::uint32_t base, heads, tails;  // bit k of heads (tails): a run begins (ends) at base + k
  int valid;                         // number of pairs; fewer than Items at the end of the batch
  std::uint32_t pair[Items];
  T c[Items];  // similarity

  __device__ void place(std::uint32_t first, std::uint32_t n) {
    base = first;
    valid = base >= n ? 0 : (n - base < Items ? static_cast<int>(n - base) : Items);
  }
  __device__ bool begins(int k) const { return heads >> k & 1; }
  __device__ bool ends(int k) const { return tails >> k & 1; }
  template <class Bits>
  __device__ __forceinline__ void find_heads(const Bits (&key)[Items], Bits before, Bits behind, std::uint32_t n) {
    heads = base == 0;
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      if (key[k] != (k ? key[k ? k - 1 : 0] : before)) heads |= 1u << k;
    }
    const std::uint32_t inside = valid ? ~0u >> (32 - valid) : 0, last = base + valid == n ? inside & ~(inside >> 1) : 0;
    tails = ((heads >> 1 | (key[Items - 1] != behind ? 1u << (Items - 1) : 0)) & inside) | last;
    heads &= inside;
  }
};

}  // namespace raoe
