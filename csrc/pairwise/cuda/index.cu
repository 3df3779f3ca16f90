// Around the sort of the device-wide pairwise losses: its keys; and what is found in the order it makes.
#include <cub/block/block_scan.cuh>

#include "../../cuda_check.h"
#include "tiles.h"

namespace raoe {
namespace {

using Count = cub::BlockScan<std::uint32_t, BLOCK>;

// 1. Keys to sort by; each tile's largest similarity and distinct labels.
template <class T>
__global__ void __launch_bounds__(BLOCK) prepare(const Work<T> work) {
  __shared__ T maxima[BLOCK / 32 + 1];
  __shared__ std::int64_t minima[BLOCK / 32 + 1];
  const PairwiseArgs& args = work.args;
  const std::int64_t tile_base = std::int64_t(blockIdx.x) * TILE;
  std::int64_t labels[ITEMS];
  T largest = T(-INFINITY);
  bool nan = false;
  int valid = 0;
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const std::int64_t i = tile_base + k * BLOCK + threadIdx.x;
    labels[k] = 0;
    if (i < work.n) {
      if (work.sort.wide) {
        auto* keys = static_cast<std::uint64_t*>(work.sort.keys[0]);
        keys[i] = load_key<std::uint64_t>(args.scores, args.score_type, i, nan);
      } else {
        auto* keys = static_cast<std::uint32_t*>(work.sort.keys[0]);
        keys[i] = load_key<std::uint32_t>(args.scores, args.score_type, i, nan);
      }
      work.sort.values[0][i] = static_cast<std::uint32_t>(i);
      const T similarity = load<T>(args.similarity, args.similarity_type, i);
      nan |= is_nan(similarity);
      if (largest < similarity) largest = similarity;
      if (args.labels) labels[k] = args.labels[i];
      valid = k + 1;
    }
  }
  largest = block_max<BLOCK>(largest, maxima);
  if (__syncthreads_or(nan) && threadIdx.x == 0) work.state->nan = 1;  // all that write write this
  if (threadIdx.x == 0) work.tile_largest[blockIdx.x] = largest;
  if (!args.labels) return;
  std::int64_t value = 0;
  int classes = 0;
  while (classes <= CLASSES && next_label<BLOCK>(labels, valid, classes == 0, value, minima, value)) {
    if (classes < CLASSES && threadIdx.x == 0) work.tile_values[std::int64_t(blockIdx.x) * CLASSES + classes] = value;
    ++classes;
  }
  if (threadIdx.x == 0) work.tile_classes[blockIdx.x] = classes;
}

// 2. After the sort: how many runs begin in each tile.
template <class T>
__global__ void __launch_bounds__(BLOCK) count_heads(const Work<T> work) {
  __shared__ std::uint32_t shared[BLOCK / 32 + 1];
  std::uint32_t heads = 0;
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    const std::int64_t p = std::int64_t(blockIdx.x) * TILE + k * BLOCK + threadIdx.x;
    if (p < work.n) {
      heads += work.begins(p);
      work.c[p] = load<T>(work.args.similarity, work.args.similarity_type, work.sort.values[0][p]);
    }
  }
  heads = block_reduce<BLOCK>(heads, std::uint32_t(0), shared, [](std::uint32_t a, std::uint32_t b) { return a + b; });
  if (threadIdx.x == 0) work.tile_heads[blockIdx.x] = heads;
}

// 3. One block: what the tiles found, together.
template <class T>
__global__ void __launch_bounds__(BLOCK) collect(const Work<T> work) {
  __shared__ typename Count::TempStorage count_memory;
  __shared__ T maxima[BLOCK / 32 + 1];
  __shared__ std::int64_t minima[BLOCK / 32 + 1];
  State<T>& state = *work.state;
  T largest = T(-INFINITY);
  std::uint32_t runs = 0;
  for (std::uint32_t base = 0; base < work.tiles; base += BLOCK) {
    const std::uint32_t t = base + threadIdx.x;
    if (t < work.tiles && largest < work.tile_largest[t]) largest = work.tile_largest[t];
    std::uint32_t heads = t < work.tiles ? work.tile_heads[t] : 0, sum = 0;
    Count(count_memory).ExclusiveSum(heads, heads, sum);
    if (t < work.tiles) work.tile_heads[t] = runs + heads;
    runs += sum;
    __syncthreads();
  }
  largest = block_max<BLOCK>(largest, maxima);
  if (threadIdx.x == 0) {
    state.largest = largest;
    state.runs = runs;
  }
  if (!work.args.labels) return;
  int classes = 0;
  std::int64_t value = 0;
  for (bool more = true; more && classes <= CLASSES;) {
    bool found = false;
    std::int64_t least = INT64_MAX;
    for (std::uint32_t t = threadIdx.x; t < work.tiles; t += BLOCK) {
      const int count = work.tile_classes[t];
      if (count > CLASSES) classes = CLASSES + 1;
      for (int k = 0; k < count && k < CLASSES; ++k) {
        const std::int64_t label = work.tile_values[std::int64_t(t) * CLASSES + k];
        if (classes == 0 || classes > CLASSES || label > value) {
          found = true;
          least = label < least ? label : least;
          break;  // a tile's values ascend
        }
      }
    }
    if (__syncthreads_or(classes > CLASSES)) {
      classes = CLASSES + 1;
      break;
    }
    value = block_min<BLOCK>(least, minima);
    more = __syncthreads_or(found);
    if (more && classes < CLASSES && threadIdx.x == 0) state.values[classes] = value;
    classes += more;
  }
  if (threadIdx.x == 0) state.classes = classes;
}

// 4. The run and the dense label of each position.
template <class T>
__global__ void __launch_bounds__(BLOCK) number(const Work<T> work) {
  __shared__ typename Count::TempStorage count_memory;
  const Place at(blockIdx.x, work.n);
  const bool dense_labels = work.args.labels && !work.many_labels();
  bool begins[ITEMS];
  std::uint32_t runs = 0;
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    begins[k] = k < at.valid && work.begins(at.base + k);
    runs += begins[k];
  }
  Count(count_memory).ExclusiveSum(runs, runs);
  runs += work.tile_heads[blockIdx.x];
#pragma unroll
  for (int k = 0; k < ITEMS; ++k) {
    if (k >= at.valid) break;
    const std::int64_t p = at.base + k;
    if (begins[k]) work.start[runs++] = static_cast<std::uint32_t>(p);
    work.run[p] = runs - 1;
    if (dense_labels) {
      const std::int64_t label = work.args.labels[work.sort.values[0][p]];
      int id = 0;
      while (id + 1 < work.state->classes && work.state->values[id] != label) ++id;
      work.id[p] = static_cast<std::uint8_t>(id);
    }
  }
}

void launched() { check_cuda(cudaGetLastError(), "the order of the pairwise losses"); }

}  // namespace

template <class T>
void prepare_keys(const Work<T>& work, cudaStream_t stream) {
  prepare<<<work.tiles, BLOCK, 0, stream>>>(work);
  launched();
}

template <class T>
void index_runs(const Work<T>& work, cudaStream_t stream) {
  count_heads<<<work.tiles, BLOCK, 0, stream>>>(work);
  launched();
  collect<<<1, BLOCK, 0, stream>>>(work);
  launched();
  number<<<work.tiles, BLOCK, 0, stream>>>(work);
  launched();
}

template void prepare_keys(const Work<float>&, cudaStream_t);
template void prepare_keys(const Work<double>&, cudaStream_t);
template void index_runs(const Work<float>&, cudaStream_t);
template void index_runs(const Work<double>&, cudaStream_t);

}  // namespace raoe
