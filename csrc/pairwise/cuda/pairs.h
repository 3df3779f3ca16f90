// The pairs of a tile: how they are read, and what is known of them and shared.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "scan.h"

namespace raoe {

constexpr int LABEL_SHIFT = 30;  // a pair is its index, and above it its label's low bits
constexpr std::uint32_t INDEX_MASK = (1u << LABEL_SHIFT) - 1;
constexpr int COLUMN_LABELS = 3;  // values that two columns of sums tell apart

// Hidden from the compiler, that it neither reads a pointer again for each pair nor merges an index with other addresses.
template <class T>
__device__ __forceinline__ void opaque(T*& pointer) {
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

// The score as an unsigned integer of the same order; reports a NaN, wherever it then goes.
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

// What one reading of pair i finds: its sort key and payload, and what it says of all inputs.
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

// Arrays with an element a position (ends: two). Whole tiles of it are written, so they are that long, and one more.
template <class T, class Index>
struct Arrays {
  T *before, *after;         // the rank objective's sums ahead of a position; from it on
  Index* ends;               // how many positions have a doubled rank <= b, for every b from -1 on
  // Where not everything is in registers.
  Index *rank, *run;         // doubled; how many runs are before its own
  // For labels by bits only.
  std::uint64_t* label;      // less the smallest
  T *term, *below, *above;   // of the angular objective: the pair's, its partners' sums
  Index* order[2];           // positions in this bit's order, and in the next one's
};

// What only several blocks need.
template <class T>
struct Crossing {
  const void* keys;            // sorted
  const std::uint32_t* pairs;  // in that order
  const T* similarity;         // in the caller's
  std::uint32_t n, tiles;
  bool wide;                   // keys have 64 bits
  unsigned char* spans;        // (2, tiles + 1) Span: of each tile forwards, backwards
  unsigned char* joined;       // (2, blocks) Sum: of Z
  unsigned* arrived;           // blocks at a barrier; 0 at first
  unsigned char* kept;         // (2, n) Kept, where blocks have several tiles
};
constexpr std::size_t ENDS_AHEAD = 16;  // bytes ahead of ends[0], whose multiples are stored at once
constexpr std::size_t CROSSING_BYTES = 16;  // the largest Sum

// Who works together.
struct OneBlock {
  static constexpr bool one = true;
  static __device__ unsigned index() { return 0; }
  static __device__ unsigned count() { return 1; }
  static __device__ bool resident(std::uint32_t) { return true; }  // no block has two tiles
};

// A thread's part of a tile.
template <class T, int Items>
struct Mine {
  std::uint32_t base, heads, tails;  // bit k: a run begins (ends) at base + k
  int valid;
  std::uint32_t inside_bits;  // bit k: there is a pair k
  std::uint32_t pair[Items];
  static constexpr int in_word = Items < 16 ? Items : 16;
  std::uint32_t labels[Items / in_word];  // two bits a pair, the last in the lowest; where columns tell labels apart
  T c[Items];                     // the similarity, then the exponent of the rank objective
  T term[Items], slope[Items];    // of the angular objective
  int rank[Items];            // doubled; hot only

  __device__ void place(std::uint32_t first, std::uint32_t n) {
    base = first;
    valid = base >= n ? 0 : (n - base < Items ? static_cast<int>(n - base) : Items);
    inside_bits = valid ? ~0u >> (32 - valid) : 0;
  }
  __device__ Bit inside(int k) const { return {inside_bits, 1u << k}; }
  __device__ Bit begins(int k) const { return {heads, 1u << k}; }
  __device__ Bit ends(int k) const { return {tails, 1u << k}; }
  // Labels less the smallest, which are 0, 1 and 2: behind the last pair all bits are set.
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
  // Of pair k: its label is 1 or 2; 2.
  __device__ Bit some(int k) const { return {labels[k / in_word], 3u << place_of(k)}; }
  __device__ Bit second(int k) const { return {labels[k / in_word], 2u << place_of(k)}; }
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
