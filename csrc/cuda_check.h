// A CUDA call that failed becomes an exception that names what was being done.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace raoe {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace raoe
