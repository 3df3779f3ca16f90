// Python sees addresses and sizes; it has checked shapes, dtypes and devices, and it owns all memory.
#include <pybind11/pybind11.h>

#include "cosine/cosine.h"
#include "pairwise/pairwise.h"

namespace py = pybind11;

namespace {

template <class T = void>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void pairwise(std::uintptr_t similarity, std::uintptr_t scores, std::uintptr_t labels, std::int64_t n,
              int similarity_type, int score_type, int ties, bool rank, bool angle, bool parts, double tau,
              std::int64_t threshold, double rank_weight, double angle_weight, std::uintptr_t losses,
              std::uintptr_t grads, int threads) {
  const py::gil_scoped_release release;
  raoe::pairwise_cpu({at(similarity), at(scores), at<const std::int64_t>(labels), n,
                      static_cast<raoe::Float>(similarity_type), static_cast<raoe::Key>(score_type),
                      static_cast<raoe::Ties>(ties), rank, angle, parts, tau, threshold, rank_weight, angle_weight,
                      at(losses), at(grads)},
                     threads);
}

void scale(std::uintptr_t grads, std::int64_t n, int type, int rows, std::uintptr_t first, std::uintptr_t second,
           std::uintptr_t out) {
  const py::gil_scoped_release release;
  raoe::scale_cpu(at(grads), n, static_cast<raoe::Float>(type), rows, at(first), at(second), at(out));
}

void cosine(std::uintptr_t a, std::uintptr_t b, std::int64_t rows, std::int64_t columns, std::int64_t stride_a,
            std::int64_t stride_b, int type, double eps, std::uintptr_t c, std::uintptr_t inverse_a,
            std::uintptr_t inverse_b, int threads) {
  const py::gil_scoped_release release;
  raoe::cosine_cpu({at(a), at(b), rows, columns, stride_a, stride_b, static_cast<raoe::Float>(type), eps, at(c),
                    at(inverse_a), at(inverse_b)},
                   threads);
}

void cosine_grad(std::uintptr_t grad, std::uintptr_t a, std::uintptr_t b, std::int64_t rows, std::int64_t columns,
                 std::int64_t stride_a, std::int64_t stride_b, int type, std::uintptr_t c, std::uintptr_t inverse_a,
                 std::uintptr_t inverse_b, std::uintptr_t grad_a, std::uintptr_t grad_b, int threads) {
  const py::gil_scoped_release release;
  raoe::cosine_grad_cpu({at(grad), at(a), at(b), rows, columns, stride_a, stride_b, static_cast<raoe::Float>(type),
                         at(c), at(inverse_a), at(inverse_b), at(grad_a), at(grad_b)},
                        threads);
}

}  // namespace

// Arguments as in the structures PairwiseArgs, CosineArgs and CosineGradArgs, addresses as integers (0:
// none).
PYBIND11_MODULE(_native_cpu, module) {
  module.def("pairwise", &pairwise);
  module.def("scale", &scale);
  module.def("cosine", &cosine);
  module.def("cosine_grad", &cosine_grad);
}
