// Python passes addresses and sizes. It has checked shapes, dtypes and devices, it owns all memory, and it has made the
// tensors' device current. Every call only queues work on the stream that is its last argument.
#include "pairwise/pairwise.h"
#include "bindings.h"

// Python passes the arguments of the C++ functions: structures field by field, addresses as integers (0: none).
PyMODINIT_FUNC PyInit__native_cuda() {
  using raoe::python::method;
  return raoe::python::module(
      "_native_cuda", method<&raoe::pairwise_cuda_unusable>("unusable"),
      method<&raoe::pairwise_cuda_workspace>("pairwise_workspace"), method<&raoe::pairwise_cuda>("pairwise"));
}
