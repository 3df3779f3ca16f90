// Turn a failed CUDA call into an exception that names the failed step.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace raoe {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clear the error, or the next launch would report it again
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Return why the current GPU or its driver cannot run a kernel, or "" if it can. The query loads the kernel's code.
// While any thread captures a graph, CUDA refuses to load code unless this thread's capture mode is relaxed.
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
