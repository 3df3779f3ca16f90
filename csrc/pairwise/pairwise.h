// What a pairwise loss is asked to do, as the compiled drivers receive it. No torch: pointers, sizes, a
// stream handle.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../types.h"

namespace raoe {

enum class Key : int { f32 = 0, f64 = 1, i64 = 2 };                      // dtype of scores
enum class Ties : int { average = 0, min = 1, max = 2, dense = 3, ordinal = 4 };

// All arrays are contiguous. losses and grads are float, or double where similarity is f64.
struct PairwiseArgs {
  const void* similarity;       // (n)
  const void* scores;           // (n)
  const std::int64_t* labels;   // (n), or null: the angular objective then compares s_i < s_j alone
  std::int64_t n;               // >= 1
  Float similarity_type;        // the CPU driver takes f32 and f64 only
  Key score_type;
  Ties ties;
  bool rank, angle;             // which objectives are wanted
  bool parts;                   // two rows of results instead of their sum
  double tau;
  std::int64_t threshold;       // 2 r_j - 2 r_i >= threshold makes (i, j) a rank pair; >= 1
  double rank_weight, angle_weight;
  void* losses;                 // (rows)
  void* grads;                  // (rows, n) in the caller's order, or null: no gradient work
};

// cpu/pairwise.cpp. Uses up to `threads` threads where that pays; the result does not depend on how many.
// `rows` similarities of the same pairs at one sort: similarity is (rows, n), losses are (parts, rows) and grads
// (parts, rows, n). Throws std::bad_alloc, and std::invalid_argument beyond 2^28 pairs.
void pairwise_cpu(const PairwiseArgs& args, std::int64_t rows, int threads);

// out (rows, n) = first x grads[0] + second x grads[1], or first x grads[0] for one part; first and second are (rows),
// grads (parts, rows, n). All are f32, or all f64.
void scale_cpu(const void* grads, std::int64_t n, Float type, int parts, std::int64_t rows, const void* first,
               const void* second, void* out);

// cuda/pairwise.cu. Everything happens on `stream`; nothing is allocated and nothing is waited for.
std::size_t pairwise_cuda_workspace(const PairwiseArgs& args);
void pairwise_cuda(const PairwiseArgs& args, void* workspace, void* stream);

}  // namespace raoe
