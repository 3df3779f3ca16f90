// Types shared by the headers of all ops. The C++ code does not use torch: it gets pointers, sizes and a stream handle.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define RAOE_HD __host__ __device__ __forceinline__
#else
#define RAOE_HD inline
#endif

namespace raoe {

enum class Float : int { f16 = 0, bf16 = 1, f32 = 2, f64 = 3 };  // dtype of the inputs that have gradients

}  // namespace raoe
