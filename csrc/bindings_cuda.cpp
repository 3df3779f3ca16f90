// Python sees addresses and sizes; it has checked shapes, dtypes and devices, it owns all memory, and it has made the
// tensors' device the current one. Every call only queues work on `stream`.
#include <pybind11/pybind11.h>

#include "cosine/cosine.h"
#include "pairwise/pairwise.h"

namespace py = pybind11;

namespace {

template <class T = void>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

raoe::PairwiseArgs pairwise_args(std::uintptr_t similarity, std::uintptr_t scores, std::uintptr_t labels,
                                 std::int64_t n, int similarity_type, int score_type, int ties, bool rank, bool angle,
                                 bool parts, double tau, std::int64_t threshold, double rank_weight,
                                 double angle_weight, std::uintptr_t losses, std::uintptr_t grads) {
  return {at(similarity), at(scores), at<const std::int64_t>(labels), n, static_cast<raoe::Float>(similarity_type),
          static_cast<raoe::Key>(score_type), static_cast<raoe::Ties>(ties), rank, angle, parts, tau, threshold,
          rank_weight, angle_weight, at(losses), at(grads)};
}

// Takes what `pairwise` takes, less the workspace and the stream; returns bytes, 0 where none are needed.
template <class... Args>
std::size_t pairwise_workspace(Args... args) {
  return raoe::pairwise_cuda_workspace(pairwise_args(args...));
}

void cosine(std::uintptr_t a, std::uintptr_t b, std::int64_t rows, std::int64_t columns, std::int64_t stride_a,
            std::int64_t stride_b, int type, double eps, std::uintptr_t c, std::uintptr_t inverse_a,
            std::uintptr_t inverse_b, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  raoe::cosine_cuda({at(a), at(b), rows, columns, stride_a, stride_b, static_cast<raoe::Float>(type), eps, at(c),
                     at(inverse_a), at(inverse_b)},
                    at(stream));
}

void cosine_grad(std::uintptr_t grad, std::uintptr_t a, std::uintptr_t b, std::int64_t rows, std::int64_t columns,
                 std::int64_t stride_a, std::int64_t stride_b, int type, std::uintptr_t c, std::uintptr_t inverse_a,
                 std::uintptr_t inverse_b, std::uintptr_t grad_a, std::uintptr_t grad_b, std::uintptr_t stream) {
  const py::gil_scoped_release release;
  raoe::cosine_grad_cuda({at(grad), at(a), at(b), rows, columns, stride_a, stride_b, static_cast<raoe::Float>(type),
                          at(c), at(inverse_a), at(inverse_b), at(grad_a), at(grad_b)},
                         at(stream));
}

// The argument list is written once, in pairwise_args.
template <class... Args>
void define_pairwise(py::module_& module, raoe::PairwiseArgs (*)(Args...)) {
  module.def("pairwise_workspace", &pairwise_workspace<Args...>);
  module.def("pairwise", [](Args... args, std::uintptr_t workspace, std::uintptr_t stream) {
    const py::gil_scoped_release release;
    raoe::pairwise_cuda(pairwise_args(args...), at(workspace), at(stream));
  });
}

}  // namespace

// Arguments as in the structures PairwiseArgs, CosineArgs and CosineGradArgs, addresses as integers (0: none).
PYBIND11_MODULE(_native_cuda, module) {
  module.def("unusable", &raoe::cosine_cuda_unusable);
  define_pairwise(module, &pairwise_args);
  module.def("cosine", &cosine);
  module.def("cosine_grad", &cosine_grad);
}
