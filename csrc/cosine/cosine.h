// Cosine similarity of each row of a with the same row of b, as the compiled drivers receive it.
#pragma once

#include <cstdint>
#include <vector>

#include "../types.h"

namespace raoe {

// Rows have unit inner stride; stride_a and stride_b count elements between the starts of rows.
// Results are float, or double where the rows are f64.
struct CosineArgs {
  const void* a;                // (rows, columns)
  const void* b;                // (rows, columns)
  std::int64_t rows, columns, stride_a, stride_b;
  Float type;                   // the CPU driver takes f32 and f64 only
  double eps;                   // a norm <= eps makes all three results of the row 0
  void* c;                      // (rows)
  void* inverse_a;              // (rows), 1 / |a|
  void* inverse_b;              // (rows), 1 / |b|
};

struct CosineGradArgs {
  const void* grad;             // (rows), of c's type
  const void* a;
  const void* b;
  std::int64_t rows, columns, stride_a, stride_b;
  Float type;
  const void* c;                // what the forward pass returned
  const void* inverse_a;
  const void* inverse_b;
  void* grad_a;                 // (rows, columns) contiguous, of the rows' type; or null: not wanted
  void* grad_b;
};

// `dims` are increasing widths, at least one, the last at most `columns`: row k of c, of the inverses and of the upstream
// gradient, (dims.size(), rows) each, is that of the first dims[k] columns.
void cosine_cpu(const CosineArgs& args, const std::vector<std::int64_t>& dims, int threads);
void cosine_grad_cpu(const CosineGradArgs& args, const std::vector<std::int64_t>& dims, int threads);

void cosine_cuda(const CosineArgs& args, void* stream);
void cosine_grad_cuda(const CosineGradArgs& args, void* stream);
const char* cosine_cuda_unusable();  // as unusable in cuda_check.h

}  // namespace raoe
