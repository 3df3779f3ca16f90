// What a pairwise loss is asked to do, as the compiled drivers receive it. No torch: pointers, sizes, a stream handle.
#pragma once

#include <cstddef>
#include <cstdint>

namespace raoe {

enum class Float : int { f16 = 0, bf16 = 1, f32 = 2, f64 = 3 };          // dtype of similarity
enum class Key : int { f32 = 0, f64 = 1, i64 = 2 };                      // dtype of scores
enum class Ties : int { average = 0, min = 1, max = 2, dense = 3, ordinal = 4 };

// All arrays are contiguous. losses and grads are float, or double where similarity is f64.
struct PairwiseArgs {
  const void* similarity;       // (n)
  const void* scores;           // (n)
  const std::int64_t* labels;   // (n), or null: the angular objective then compares s_i < s_j alone
  std::int64_t n;               // >= 1
  Float similarity_type;
  Key score_type;
  Ties ties;
  bool rank, angle;             // which objectives are wanted
  bool parts;                   // two rows of results instead of their sum
  double tau;
  std::int64_t threshold;       // 2 r_j - 2 r_i >= threshold makes (i, j) a rank pair
  double rank_weight, angle_weight;
  void* losses;                 // (rows)
  void* grads;                  // (rows, n) in the caller's order, or null: no gradient work
};

}  // namespace raoe
