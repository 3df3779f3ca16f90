#include "block.h"

namespace raoe {

// Four doubles per thread need twice as many registers as four floats, so a multiprocessor can hold only 512 threads.
bool one_block_f64(const PairwiseArgs& args, cudaStream_t stream) {
  return launch_one_block<double, 128>(args, stream) || launch_one_block<double, 256>(args, stream) ||
         launch_one_block<double, 512>(args, stream);
}

}  // namespace raoe
