// The module of the CPU kernels. Python has checked shapes, dtypes and devices, and it owns all memory.
#include <vector>

#include "bindings.h"
#include "cosine/cosine.h"
#include "pairwise/pairwise.h"

PYBIND11_MODULE(_native_cpu, module) {
  using raoe::Address;
  using raoe::Float;
  using raoe::WithoutGil;
  using Integer = std::int64_t;

  module.def("pairwise", raoe::with_pairwise_fields(&raoe::pairwise_cpu), WithoutGil());
  module.def(
      "scale",
      [](Address grads, Integer n, int type, int parts, Integer rows, Address first, Address second, Address out) {
        raoe::scale_cpu(grads, n, Float(type), parts, rows, first, second, out);
      },
      WithoutGil());
  module.def(
      "cosine",
      [](Address a, Address b, Integer rows, Integer columns, Integer stride_a, Integer stride_b, int type, double eps,
         Address c, Address inverse_a, Address inverse_b, const std::vector<Integer>& dims, int threads) {
        raoe::cosine_cpu({a, b, rows, columns, stride_a, stride_b, Float(type), eps, c, inverse_a, inverse_b}, dims,
                         threads);
      },
      WithoutGil());
  module.def(
      "cosine_grad",
      [](Address grad, Address a, Address b, Integer rows, Integer columns, Integer stride_a, Integer stride_b,
         int type, Address c, Address inverse_a, Address inverse_b, Address grad_a, Address grad_b,
         const std::vector<Integer>& dims, int threads) {
        raoe::cosine_grad_cpu({grad, a, b, rows, columns, stride_a, stride_b, Float(type), c, inverse_a, inverse_b,
                               grad_a, grad_b},
                              dims, threads);
      },
      WithoutGil());
}
