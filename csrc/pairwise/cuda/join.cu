// Loss and gradient of the device-wide pairwise losses, from the finished scans.
#include "../../cuda_check.h"
#include "tiles.h"

namespace raoe {
namespace {

// 8. Z of each tile: its j with all their partners.
template <class T>
__global__ void __launch_bounds__(BLOCK) join(const Work<T> work) {
  __shared__ LogSum<T> shared[BLOCK / 32 + 1];
  T rank[ITEMS], angular[ITEMS];
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const std::int64_t p = std::int64_t(blockIdx.x) * TILE + k * BLOCK + threadIdx.x;
    rank[k] = p < work.n && work.args.rank ? work.rank_partners_below(p) - work.rank_x(p) : T(-INFINITY);
    angular[k] = p < work.n && work.args.angle ? work.angle_partners_below(p) - work.angle_x(p) : T(-INFINITY);
  }
  const LogSum<T> rank_sum = tile_sum<BLOCK>(rank, shared), angle_sum = tile_sum<BLOCK>(angular, shared);
  if (threadIdx.x == 0) {
    work.tile_joined[blockIdx.x] = rank_sum;
    work.tile_joined[work.tiles + blockIdx.x] = angle_sum;
  }
}

// 9. One block: the losses.
template <class T>
__global__ void __launch_bounds__(BLOCK) finish(const Work<T> work) {
  __shared__ LogSum<T> shared[BLOCK / 32 + 1];
  const PairwiseArgs& args = work.args;
  T losses[2];
  for (int part = 0; part < 2; ++part) {
    LogSum<T> sum = no_terms<T>();
    for (std::int64_t t = threadIdx.x; t < work.tiles; t += BLOCK) {
      sum = plus(sum, work.tile_joined[part * std::int64_t(work.tiles) + t]);
    }
    losses[part] = softplus(log_of(block_sum<BLOCK>(sum, shared)));
  }
  if (threadIdx.x) return;
  const T poison = work.state->nan ? T(NAN) : T(0);
  const T rank = static_cast<T>(args.rank_weight) * losses[0], angular = static_cast<T>(args.angle_weight) * losses[1];
  T* const rows = static_cast<T*>(args.losses);
  work.state->losses[0] = losses[0];
  work.state->losses[1] = losses[1];
  if (args.parts) {
    rows[0] = (args.rank ? rank : T(0)) + poison;
    rows[1] = (args.angle ? angular : T(0)) + poison;
  } else {
    rows[0] = (args.rank ? rank : T(0)) + (args.angle ? angular : T(0)) + poison;
  }
}

// 10. The gradient: dL/dx = exp(x + Q - L), dL/dy = exp(y + P - L), in the caller's order.
template <class T>
__global__ void __launch_bounds__(BLOCK) gradient(const Work<T> work) {
  const PairwiseArgs& args = work.args;
  const std::int64_t p = std::int64_t(blockIdx.x) * BLOCK + threadIdx.x;
  if (p >= work.n) return;
  T rank = T(0), angular = T(0);
  if (args.rank) {
    const T x = work.rank_x(p), loss = work.state->losses[0];
    rank = static_cast<T>(args.tau * args.rank_weight) *
           (exp(x + work.rank_partners_above(p) - loss) - exp(work.rank_partners_below(p) - x - loss));
  }
  if (args.angle) {
    const T x = work.angle_x(p), loss = work.state->losses[1];
    angular = static_cast<T>(args.tau * args.angle_weight) * angle_slope(work.c[p]) *
              (exp(x + work.angle_partners_above(p) - loss) - exp(work.angle_partners_below(p) - x - loss));
  }
  const T poison = work.state->nan ? T(NAN) : T(0);
  T* const row = static_cast<T*>(args.grads);
  const std::int64_t i = work.sort.values[0][p];
  if (args.parts) {
    row[i] = rank + poison;
    row[work.n + i] = angular + poison;
  } else {
    row[i] = rank + angular + poison;
  }
}

void launched() { check_cuda(cudaGetLastError(), "the pairwise losses"); }

}  // namespace

template <class T>
void join_and_differentiate(const Work<T>& work, cudaStream_t stream) {
  join<<<work.tiles, BLOCK, 0, stream>>>(work);
  launched();
  finish<<<1, BLOCK, 0, stream>>>(work);
  launched();
  if (work.args.grads) {
    gradient<<<(work.n - 1) / BLOCK + 1, BLOCK, 0, stream>>>(work);
    launched();
  }
}

template void join_and_differentiate(const Work<float>&, cudaStream_t);
template void join_and_differentiate(const Work<double>&, cudaStream_t);

}  // namespace raoe
