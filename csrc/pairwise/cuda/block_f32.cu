#include "block.h"

namespace raoe {

bool one_block_f32(const PairwiseArgs& args, cudaStream_t stream) {
  return launch_one_block<float, 128>(args, stream) || launch_one_block<float, 256>(args, stream) ||
         launch_one_block<float, 512>(args, stream) || launch_one_block<float, 1024>(args, stream);
}

}  // namespace raoe
