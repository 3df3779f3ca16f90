// Between the matrix products of InfoNCE over several prefix widths: from products of rows and columns to losses, and
// to what the products' gradients are made of. As the compiled drivers receive it.
#pragma once

#include <cstdint>

#include "../types.h"

namespace raoe {

// All arrays are contiguous and of `type`, but for own and ignored. Logits of width k are
// x = of_rows[k] (dots[0] + ... + dots[k]) of_columns[k].
struct WidthsArgs {
  void* dots;                  // (widths, rows, columns): products over the columns between two widths. With gradients
                               // they become the gradient by them: the sum over the widths that a product is in
  const void* of_rows;         // (widths, rows): tau / |row|
  const void* of_columns;      // (widths, columns): 1 / |column|
  const std::int64_t* own;     // (rows): the column that is each row's positive
  const std::uint8_t* ignored; // (rows, columns) or null: not 0 where a column is left out; own counts all the same
  const void* factors;         // (widths): what the gradient of each width is multiplied by
  void* losses;                // (widths, rows): log(1 + others / own)
  void* along_rows;            // (widths, rows), the sum over columns of factor dL/dx x; or null: no gradients
  void* along_columns;         // (widths, columns): the same over rows is added to it
  std::int64_t widths, rows, columns;
  Float type;                  // f32 or f64
};

void info_nce_widths_cpu(const WidthsArgs& args, int threads);

}  // namespace raoe
