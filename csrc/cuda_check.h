// A CUDA call that failed becomes an exception that names what was being done.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace raoe {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // keeps the first error until it is asked for: the next launch would be blamed for this one
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Why the current GPU or its driver does not take a kernel's code, "" if it does; asking loads the code. That is refused
// while any thread captures a graph, unless this thread says that it may.
template <class Kernel>
const char* unusable(Kernel* kernel) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaGetLastError();
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

}  // namespace raoe
