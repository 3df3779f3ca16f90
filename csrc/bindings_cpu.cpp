// The module of the CPU kernels. Python has checked shapes, dtypes and devices, and it owns all memory.
#include "cosine/cosine.h"
#include "pairwise/pairwise.h"
#include "bindings.h"

// Python passes a structure field by field, and an address as an integer (0: null).
PyMODINIT_FUNC PyInit__native_cpu() {
  using raoe::python::method;
  return raoe::python::module(
      "_native_cpu", method<&raoe::pairwise_cpu>("pairwise"), method<&raoe::scale_cpu>("scale"),
      method<&raoe::cosine_cpu>("cosine"), method<&raoe::cosine_grad_cpu>("cosine_grad"));
}
