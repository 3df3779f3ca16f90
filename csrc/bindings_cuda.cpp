// The module of the CUDA kernels. Python has checked shapes, dtypes and devices, owns all memory, and has made the
// tensors' device current. A call only queues work on a stream, which is its last argument.
#include "bindings.h"
#include "pairwise/pairwise.h"

PYBIND11_MODULE(_native_cuda, module) {
  using raoe::with_pairwise_fields;
  using raoe::WithoutGil;

  module.def("unusable", &raoe::pairwise_cuda_unusable, WithoutGil());
  module.def("pairwise_workspace", with_pairwise_fields(&raoe::pairwise_cuda_workspace), WithoutGil());
  module.def("pairwise", with_pairwise_fields(&raoe::pairwise_cuda), WithoutGil());
}
