// Python sees addresses and sizes; it has checked shapes, dtypes and devices, and it owns all memory.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <type_traits>
#include <vector>

#include "cosine/cosine.h"
#include "infonce/widths.h"
#include "pairwise/pairwise.h"

namespace py = pybind11;

namespace {

template <class T = void>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Dims = std::vector<std::int64_t>;  // none: one width, all columns

void pairwise(std::int64_t rows, std::uintptr_t similarity, std::uintptr_t scores, std::uintptr_t labels, std::int64_t n,
              int similarity_type, int score_type, int ties, bool rank, bool angle, bool parts, double tau,
              std::int64_t threshold, double rank_weight, double angle_weight, std::uintptr_t losses,
              std::uintptr_t grads, int threads) {
  const py::gil_scoped_release release;
  raoe::pairwise_cpu({at(similarity), at(scores), at<const std::int64_t>(labels), n,
                      static_cast<raoe::Float>(similarity_type), static_cast<raoe::Key>(score_type),
                      static_cast<raoe::Ties>(ties), rank, angle, parts, tau, threshold, rank_weight, angle_weight,
                      at(losses), at(grads)},
                     rows, threads);
}

void scale(std::int64_t rows, std::uintptr_t grads, std::int64_t n, int type, int parts, std::uintptr_t first,
           std::uintptr_t second, std::uintptr_t out) {
  const py::gil_scoped_release release;
  raoe::scale_cpu(at(grads), n, static_cast<raoe::Float>(type), parts, rows, at(first), at(second), at(out));
}

void cosine(const Dims& dims, std::uintptr_t a, std::uintptr_t b, std::int64_t rows, std::int64_t columns,
            std::int64_t stride_a, std::int64_t stride_b, int type, double eps, std::uintptr_t c,
            std::uintptr_t inverse_a, std::uintptr_t inverse_b, int threads) {
  const py::gil_scoped_release release;
  raoe::cosine_cpu({at(a), at(b), rows, columns, stride_a, stride_b, static_cast<raoe::Float>(type), eps, at(c),
                    at(inverse_a), at(inverse_b)},
                   dims.empty() ? Dims{columns} : dims, threads);
}

void cosine_grad(const Dims& dims, std::uintptr_t grad, std::uintptr_t a, std::uintptr_t b, std::int64_t rows,
                 std::int64_t columns, std::int64_t stride_a, std::int64_t stride_b, int type, std::uintptr_t c,
                 std::uintptr_t inverse_a, std::uintptr_t inverse_b, std::uintptr_t grad_a, std::uintptr_t grad_b,
                 int threads) {
  const py::gil_scoped_release release;
  raoe::cosine_grad_cpu({at(grad), at(a), at(b), rows, columns, stride_a, stride_b, static_cast<raoe::Float>(type),
                         at(c), at(inverse_a), at(inverse_b), at(grad_a), at(grad_b)},
                        dims.empty() ? Dims{columns} : dims, threads);
}

void info_nce_widths(std::uintptr_t dots, std::uintptr_t of_rows, std::uintptr_t of_columns, std::uintptr_t own,
                     std::uintptr_t ignored, std::uintptr_t factors, std::uintptr_t losses, std::uintptr_t along_rows,
                     std::uintptr_t along_columns, std::int64_t widths, std::int64_t rows, std::int64_t columns,
                     int type, int threads) {
  const py::gil_scoped_release release;
  raoe::info_nce_widths_cpu({at(dots), at(of_rows), at(of_columns), at<const std::int64_t>(own),
                             at<const std::uint8_t>(ignored), at(factors), at(losses), at(along_rows),
                             at(along_columns), widths, rows, columns, static_cast<raoe::Float>(type)},
                            threads);
}

// Without the first argument it is `one`.
template <class First, class... Rest>
void define(py::module_& module, const char* name, void (*function)(First, Rest...), std::decay_t<First> one) {
  module.def(name, [function, one](Rest... rest) { function(one, rest...); });
  module.def(name, function);
}

}  // namespace

// Arguments as in the structures PairwiseArgs, CosineArgs, CosineGradArgs and WidthsArgs, addresses as integers (0:
// none).
PYBIND11_MODULE(_native_cpu, module) {
  define(module, "pairwise", &pairwise, 1);
  define(module, "scale", &scale, 1);
  define(module, "cosine", &cosine, {});
  define(module, "cosine_grad", &cosine_grad, {});
  module.def("info_nce_widths", &info_nce_widths);
}
