// Cosine similarity of each row of a with the same row of b, on the CPU: arguments of the compiled functions.
#pragma once

#include <cstdint>
#include <vector>

#include "../types.h"

namespace raoe {

// Elements of a row are contiguous; stride_a and stride_b count elements between the starts of rows.
// Results are float, or double if the rows are f64.
struct CosineArgs {
  const void* a;                // (rows, columns)
  const void* b;                // (rows, columns)
  std::int64_t rows, columns, stride_a, stride_b;
  Float type;                   // f32 or f64
  double eps;                   // if |a| or |b| of a row is <= eps, its c and both inverses are 0
  void* c;                      // (rows)
  void* inverse_a;              // (rows), 1 / |a|
  void* inverse_b;              // (rows), 1 / |b|
};

struct CosineGradArgs {
  const void* grad;             // (rows) upstream gradient, of the same type as c
  const void* a;
  const void* b;
  std::int64_t rows, columns, stride_a, stride_b;
  Float type;
  const void* c;                // c and the inverses: results of the forward pass
  const void* inverse_a;
  const void* inverse_b;
  void* grad_a;                 // (rows, columns) contiguous, of the rows' type; null if not needed
  void* grad_b;
};

// `dims` holds one or more increasing widths, at most `columns`. c, the inverses and the
// upstream gradient have shape (dims.size(), rows); row k belongs to the first dims[k] columns.
void cosine_cpu(const CosineArgs& args, const std::vector<std::int64_t>& dims, int threads);
void cosine_grad_cpu(const CosineGradArgs& args, const std::vector<std::int64_t>& dims, int threads);

}  // namespace raoe
