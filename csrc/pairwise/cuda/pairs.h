// The pairs of a tile: how they are read, and the data that threads and blocks hold and share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "scan.h"

namespace raoe {

constexpr int LABEL_SHIFT = 30;  // a pair holds its index in the low bits, and its label's low bits above
constexpr std::uint32_t INDEX_MASK = (1u << LABEL_SHIFT) - 1;
constexpr int COLUMN_LABELS = 3;  // number of labels for which two columns of sums suffice

// Hide a value's origin from the compiler: otherwise it reloads a pointer for each pair, or merges index computations.
template <class T>
__device__ __forceinline__ void hide_origin(T*& pointer) {
  pointer = reinterpret_cast<T*>(__shfl_sync(0xffffffffu, reinterpret_cast<std::uintptr_t>(pointer), 0));
}
__device__ __forceinline__ std::uint32_t index_of(std::uint32_t pair) {
  std::uint32_t index = pair & INDEX_MASK;
  asm("" : "+r"(index));
  return index;
}

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

// Read pair i: return its similarity, sort key and payload, and add it to the extent of all inputs.
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

// Arrays with one element per position (two in ends). They have room for whole tiles, plus one element.
template <class T, class Index>
struct Arrays {
  T *before, *after;         // the rank objective's sums before a position, and from it on
  Index* ends;               // ends[b]: number of positions with a doubled rank <= b, for every b from -1 on
  // Only if not everything is in registers:
  Index *rank, *run;         // doubled rank; number of earlier runs
  // Only for labels by bits:
  std::uint64_t* label;      // label minus the smallest label
  T *term, *below, *above;   // angular objective: the pair's term, and its partners' sums
  Index* order[2];           // positions in the order of this bit and of the next bit
};

// Data for a launch of several blocks.
template <class T>
struct Crossing {
  const void* keys;            // sorted keys
  const std::uint32_t* pairs;  // in the order of the keys
  const T* similarity;         // in the caller's order
  std::uint32_t n, tiles;
  bool wide;                   // whether keys have 64 bits
  unsigned char* spans;        // (2, tiles + 1) Span: of each tile, forwards and backwards
  unsigned char* joined;       // (2, blocks) Sum: each block's Z
  unsigned* arrived;           // number of blocks at the barrier; initially 0
  unsigned char* kept;         // (2, n) Kept, if blocks have several tiles
};
constexpr std::size_t ENDS_AHEAD = 16;  // bytes before ends[0], so that stores to ends stay 16-byte aligned
constexpr std::size_t CROSSING_BYTES = 16;  // size of the largest Sum

// The blocks that work together: here a single one.
struct OneBlock {
  static constexpr bool one = true;
  static __device__ unsigned index() { return 0; }
  static __device__ unsigned count() { return 1; }
  static __device__ bool resident(std::uint32_t) { return true; }  // each block has at most one tile
};

// A thread's part of a tile.
template <class T, int Items>
struct ThreadTile {
  std::uint32_t base, heads, tails;  // bit k of heads (tails): a run begins (ends) at base + k
  int valid;
  std::uint32_t inside_bits;  // bit k: pair k exists
  std::uint32_t pair[Items];
  static constexpr int in_word = Items < 16 ? Items : 16;
  std::uint32_t labels[Items / in_word];  // two bits per pair, the last pair lowest; only for labels by columns
  T c[Items];                     // the similarity, later the exponent of the rank objective
  T term[Items], slope[Items];    // of the angular objective
  int rank[Items];            // doubled rank; hot code only

  __device__ void place(std::uint32_t first, std::uint32_t n) {
    base = first;
    valid = base >= n ? 0 : (n - base < Items ? static_cast<int>(n - base) : Items);
    inside_bits = valid ? ~0u >> (32 - valid) : 0;
  }
  __device__ Bit inside(int k) const { return {inside_bits, 1u << k}; }
  __device__ Bit begins(int k) const { return {heads, 1u << k}; }
  __device__ Bit ends(int k) const { return {tails, 1u << k}; }
  // Store labels minus the smallest label, which gives 0, 1 or 2. After the last pair all bits are set.
  __device__ __forceinline__ void find_labels(std::uint32_t smallest) {
#pragma unroll
    for (std::uint32_t& word : labels) word = 0;
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      std::uint32_t& word = labels[k / in_word];
      word = word << 2 | (pair[k] - (smallest << LABEL_SHIFT)) >> LABEL_SHIFT;
    }
#pragma unroll
    for (int k = 0; k < Items; k += in_word) {
      const int rest = valid - k < 0 ? in_word : in_word - (valid - k);
      if (rest > 0) labels[k / in_word] |= ~0u >> (32 - 2 * rest);
    }
  }
  // Whether pair k's label is 1 or 2; whether it is 2.
  __device__ Bit not_0(int k) const { return {labels[k / in_word], 3u << place_of(k)}; }
  __device__ Bit is_2(int k) const { return {labels[k / in_word], 2u << place_of(k)}; }
  static __device__ int place_of(int k) { return 2 * (in_word - 1 - k % in_word); }
  template <class Bits>
  __device__ __forceinline__ void find_heads(const Bits (&key)[Items], Bits before, Bits behind, std::uint32_t n) {
    heads = 0;
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      if (key[k] != (k ? key[k ? k - 1 : 0] : before)) heads |= 1u << k;
    }
    heads |= base == 0;
    tails = heads >> 1 | (key[Items - 1] != behind ? 1u << (Items - 1) : 0);
    if (base + Items >= n) {
      const std::uint32_t last = valid ? 1u << (valid - 1) : 0;
      heads &= last | (last - 1) * (valid != 0);
      tails = base + valid == n ? last | (tails & (last - 1)) : 0;
    }
  }
};

}  // namespace raoe
