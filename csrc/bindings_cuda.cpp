// The module of the CUDA kernels. Python has checked shapes, dtypes and devices, owns all memory, and has made the
// tensors' device current. A call only queues work on a stream, which is its last argument.
#include "pairwise/pairwise.h"
#include "bindings.h"

// Python passes a structure field by field, and an address as an integer (0: null).
PyMODINIT_FUNC PyInit__native_cuda() {
  using raoe::python::method;
  return raoe::python::module(
      "_native_cuda", method<&raoe::pairwise_cuda_unusable>("unusable"),
      method<&raoe::pairwise_cuda_workspace>("pairwise_workspace"), method<&raoe::pairwise_cuda>("pairwise"));
}
