// Pairwise losses: arguments of the compiled functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../types.h"

namespace raoe {

enum class Key : int { f32 = 0, f64 = 1, i64 = 2 };                      // dtype of scores
enum class Ties : int { average = 0, min = 1, max = 2, dense = 3, ordinal = 4 };

// All arrays are contiguous. losses and grads are float, or double if similarity is f64.
struct PairwiseArgs {
  const void* similarity;       // (n)
  const void* scores;           // (n)
  const std::int64_t* labels;   // (n); if null, the condition of the angular objective is only s_i < s_j
  std::int64_t n;               // >= 1
  Float similarity_type;        // the CPU functions take only f32 and f64
  Key score_type;
  Ties ties;
  bool rank, angle;             // whether to compute the rank-margin and the angular objective
  bool parts;                   // return two rows of results instead of their sum
  double tau;
  std::int64_t threshold;       // (i, j) is a rank pair if 2 r_j - 2 r_i >= threshold; >= 1
  double rank_weight, angle_weight;
  void* losses;                 // (rows)
  void* grads;                  // (rows, n) in the caller's order; null if no gradient is needed
};

// cpu/pairwise.cpp. Uses up to `threads` threads if the batch is large enough; results do not depend on their number.
// `rows` similarities of the same pairs share one sort: similarity is (rows, n), losses are (parts, rows) and grads
// (parts, rows, n). Throws std::bad_alloc, and std::invalid_argument for more than 2^28 pairs.
void pairwise_cpu(const PairwiseArgs& args, std::int64_t rows, int threads);

// Computes out (rows, n) = first x grads[0] + second x grads[1], or with one part first x grads[0]. first and second,
// the upstream gradients, are (rows); grads is (parts, rows, n). All arrays are f32, or all are f64.
void scale_cpu(const void* grads, std::int64_t n, Float type, int parts, std::int64_t rows, const void* first,
               const void* second, void* out);

// cuda/pairwise.cu. All work is queued on `stream`, without allocation or synchronisation.
std::size_t pairwise_cuda_workspace(const PairwiseArgs& args);
void pairwise_cuda(const PairwiseArgs& args, void* workspace, void* stream);
const char* pairwise_cuda_unusable();  // see `unusable` in cuda_check.h

}  // namespace raoe
