// The step between the matrix products of InfoNCE over several prefix widths: from products of rows and columns to
// losses, and to the gradients of these products.
#pragma once

#include <cstdint>

#include "../types.h"

namespace raoe {

// All arrays are contiguous and of `type`, except own and ignored. Logits of width k are
// x = of_rows[k] (dots[0] + ... + dots[k]) of_columns[k].
struct WidthsArgs {
  void* dots;                  // (widths, rows, columns): products over the columns between two widths. If gradients
                               // are needed, replaced by the products' gradients, summed over the widths that use them
  const void* of_rows;         // (widths, rows): tau / |row|
  const void* of_columns;      // (widths, columns): 1 / |column|
  const std::int64_t* own;     // (rows): the column of each row's positive
  const std::uint8_t* ignored; // (rows, columns) or null: not 0 where a column is left out; `own` always counts
  const void* factors;         // (widths): factor of each width's gradient
  void* losses;                // (widths, rows): log(1 + neg_sum / own_exp)
  void* along_rows;            // (widths, rows): sum over columns of factor dL/dx x; null if no gradient is needed
  void* along_columns;         // (widths, columns): the sum over rows of factor dL/dx x is added to this array
  std::int64_t widths, rows, columns;
  Float type;                  // f32 or f64
};

void info_nce_widths_cpu(const WidthsArgs& args, int threads);

}  // namespace raoe
