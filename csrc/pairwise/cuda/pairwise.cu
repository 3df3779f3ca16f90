// Choose the kernels for a call of the pairwise losses: one thread block or many.
#include <stdexcept>
#include <string>

#include "pieces.h"

namespace raoe {
namespace {

// Drop the labels if no objective uses them.
PairwiseArgs without_unused(PairwiseArgs args) {
  if (!args.angle) args.labels = nullptr;
  return args;
}

bool one_block(const PairwiseArgs& args, cudaStream_t stream) {
  if (args.n > ONE_BLOCK_PAIRS) return false;
  return args.similarity_type == Float::f64 ? one_block_f64(args, stream) : one_block_f32(args, stream);
}

}  // namespace

std::size_t pairwise_cuda_workspace(const PairwiseArgs& call) {
  PairwiseArgs args = without_unused(call);
  if (args.n > MOST_PAIRS) throw std::invalid_argument("at most 2^28 pairs, got " + std::to_string(args.n));
  args.losses = nullptr;  // query only, no launch
  return one_block(args, nullptr) ? 0 : many_blocks(args, nullptr, nullptr);
}

void pairwise_cuda(const PairwiseArgs& call, void* workspace, void* stream_handle) {
  const PairwiseArgs args = without_unused(call);
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (!one_block(args, stream)) many_blocks(args, static_cast<unsigned char*>(workspace), stream);
}

}  // namespace raoe
