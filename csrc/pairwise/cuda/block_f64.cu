#include "block.h"

namespace raoe {

// A thread's four doubles need twice the registers: 512 threads are what a multiprocessor has room for.
bool one_block_f64(const PairwiseArgs& args, cudaStream_t stream) {
  return launch_one_block<double, 128>(args, stream) || launch_one_block<double, 256>(args, stream) ||
         launch_one_block<double, 512>(args, stream);
}

}  // namespace raoe
