// Python sees addresses and sizes; it has checked shapes, dtypes and devices, it owns all memory, and it has made the
// tensors' device the current one. Every call only queues work on its last argument, a stream.
#include "cosine/cosine.h"
#include "pairwise/pairwise.h"
#include "bindings.h"

// Arguments as in the functions' headers, structures by their fields, addresses as integers (0: none).
PyMODINIT_FUNC PyInit__native_cuda() {
  using raoe::python::method;
  return raoe::python::module(
      "_native_cuda", method<&raoe::cosine_cuda_unusable>("unusable"),
      method<&raoe::pairwise_cuda_workspace>("pairwise_workspace"), method<&raoe::pairwise_cuda>("pairwise"),
      method<&raoe::cosine_cuda>("cosine"), method<&raoe::cosine_grad_cuda>("cosine_grad"));
}
