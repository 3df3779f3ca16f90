// Backward on the CPU: multiply the gradients of forward by the upstream gradients.
#include "../../simd.h"
#include "../pairwise.h"

namespace raoe {
namespace {

template <class C>
RAOE_INLINE void scale_row(const C* __restrict grads, const C* __restrict angle, std::int64_t n, C first, C second,
                           C* __restrict out) {
  if (angle == nullptr) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = grads[i] * first;
  } else {
    for (std::int64_t i = 0; i < n; ++i) out[i] = grads[i] * first + angle[i] * second;
  }
}

template <class C>
void scale_with(const void* grads, std::int64_t n, int parts, std::int64_t rows, const void* first, const void* second,
                void* out) {
  const C* const first_part = static_cast<const C*>(grads);
  const C* const second_part = parts == 1 ? nullptr : first_part + rows * n;
  vectorised([&]() RAOE_INLINE_LAMBDA {
    for (std::int64_t k = 0; k < rows; ++k) {
      scale_row(first_part + k * n, second_part ? second_part + k * n : nullptr, n, static_cast<const C*>(first)[k],
                static_cast<const C*>(second)[k], static_cast<C*>(out) + k * n);
    }
  });
}

}  // namespace

void scale_cpu(const void* grads, std::int64_t n, Float type, int parts, std::int64_t rows, const void* first,
               const void* second, void* out) {
  (type == Float::f64 ? scale_with<double> : scale_with<float>)(grads, n, parts, rows, first, second, out);
}

}  // namespace raoe
