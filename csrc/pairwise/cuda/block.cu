// The pairwise losses of up to 4096 pairs (2048 in double) in one launch of one thread block: sort, ranks, scans,
// losses, gradient. Each thread holds Items neighbouring positions of the sorted order in registers.
#include <cub/block/block_merge_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "../../cuda_check.h"
#include "logsum.h"
#include "pieces.h"

namespace raoe {
namespace {

struct Less {
  template <class V>
  __device__ bool operator()(const V& a, const V& b) const {
    return a < b;
  }
};

template <class T, int Block, int Items>
struct OneBlock {
  static constexpr int size = Block * Items;
  // 64-bit keys serve every dtype of the scores: a merge sort's cost hardly depends on their width.
  using Sort = cub::BlockMergeSort<std::uint64_t, Block, Items, std::uint32_t>;
  using Count = cub::BlockScan<int, Block>;

  struct Sorted {
    T table[size];                  // a scan, to be read at any position
    std::uint16_t run[size];        // of each position: how many runs of equal scores are before its own
    std::uint16_t start[size + 1];  // of each run, and n behind the last
  };
  union Shared {
    typename Sort::TempStorage sort;
    std::uint64_t edge[Block];
    Sorted sorted;
  };
  union Scratch {
    typename Count::TempStorage count;
    LogSum<T> sums[Block / 32 + 1];
    T maxima[Block / 32 + 1];
    std::int64_t labels[Block / 32 + 1];
  };

  const PairwiseArgs& args;
  Sorted& at;
  Scratch& scratch;
  int n, runs, valid, base;  // valid: how many of this thread's positions, which begin at base, are pairs

  __device__ int first(int p) const { return at.start[at.run[p]]; }
  __device__ int last(int p) const { return at.start[at.run[p] + 1] - 1; }

  __device__ std::int64_t rank(int p) const { return doubled_rank(args.ties, p, first(p), last(p), at.run[p]); }

  // How many positions are partners i of j = p: they come first.
  __device__ int partners_end(int p) const {
    const std::int64_t bound = rank(p) - args.threshold;
    if (bound < 0) return 0;
    const int m = static_cast<int>(prefix_probe(bound));
    if (args.ties == Ties::dense) return at.start[m + 1];
    return static_cast<int>(prefix_end(args.ties, bound, first(m), last(m)));
  }

  // The first position that is a partner j of i = p: all behind it are too.
  __device__ int partners_start(int p) const {
    const std::int64_t bound = rank(p) + args.threshold, m = suffix_probe(bound);
    if (args.ties == Ties::dense) return m < runs ? at.start[m] : n;
    if (m >= n) return n;
    const int near = static_cast<int>(m);
    return static_cast<int>(suffix_start(args.ties, bound, first(near), last(near)));
  }

  // The weighted loss from below = P, and its slope by x minus its slope by y from above = Q.
  __device__ T close(const T (&x)[Items], const T (&below)[Items], const T (&above)[Items], T (&slope)[Items]) {
    using std::exp;
    T joined[Items];
#pragma unroll
    for (int k = 0; k < Items; ++k) joined[k] = k < valid ? below[k] - x[k] : T(-INFINITY);
    const T loss = softplus(log_of(tile_sum<Block>(joined, scratch.sums)));
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      if (args.grads && k < valid) slope[k] = exp(x[k] + above[k] - loss) - exp(joined[k] - loss);
    }
    return loss;
  }

  // P and Q of the positions with label `value` (of all, where labels do not count).
  __device__ void scan_partners(const T (&x)[Items], bool rank, bool gated, bool downward, bool upward,
                                const std::int64_t (&labels)[Items], std::int64_t value, T (&below)[Items],
                                T (&above)[Items]) {
    T part[Items];
    if (downward) {
#pragma unroll
      for (int k = 0; k < Items; ++k) part[k] = k < valid && (!gated || labels[k] > value) ? x[k] : T(-INFINITY);
      tile_scan<false, Block>(part, no_terms<T>(), at.table, scratch.sums);
#pragma unroll
      for (int k = 0; k < Items; ++k) {
        const int p = base + k;
        if (k < valid && (!gated || labels[k] == value)) below[k] = at.table[rank ? partners_end(p) : first(p)];
      }
      __syncthreads();
    }
    if (upward && args.grads) {
#pragma unroll
      for (int k = 0; k < Items; ++k) part[k] = k < valid && (!gated || labels[k] < value) ? -x[k] : T(-INFINITY);
      tile_scan<true, Block>(part, no_terms<T>(), at.table, scratch.sums);
#pragma unroll
      for (int k = 0; k < Items; ++k) {
        const int p = base + k;
        if (k < valid && (!gated || labels[k] == value)) above[k] = at.table[rank ? partners_start(p) - 1 : last(p)];
      }
      __syncthreads();
    }
  }

  // Eq. 2 (rank) or Eq. 3: two scans; with labels two for each of their values, what is above it and what is below it.
  __device__ T objective(bool rank, const T (&x)[Items], const std::int64_t (&labels)[Items], T (&slope)[Items]) {
    T below[Items], above[Items];
#pragma unroll
    for (int k = 0; k < Items; ++k) below[k] = above[k] = T(-INFINITY);
    const bool gated = !rank && args.labels;
    std::int64_t value = 0, next = 0;
    if (gated) next_label<Block>(labels, valid, true, 0, scratch.labels, value);  // there is one, since n >= 1
    for (bool smallest = true, more = true; more; smallest = false, value = next) {
      more = gated && next_label<Block>(labels, valid, false, value, scratch.labels, next);
      scan_partners(x, rank, gated, !gated || more, !gated || !smallest, labels, value, below, above);
    }
    return close(x, below, above, slope);
  }
};

template <class T, int Block, int Items>
__global__ void __launch_bounds__(Block) one_block(const PairwiseArgs args) {
  using Work = OneBlock<T, Block, Items>;
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ __align__(16) typename Work::Scratch scratch;
  typename Work::Shared& shared = *reinterpret_cast<typename Work::Shared*>(memory);
  const int n = static_cast<int>(args.n), base = static_cast<int>(threadIdx.x) * Items;
  const int valid = n - base < 0 ? 0 : (n - base < Items ? n - base : Items);

  std::uint64_t key[Items];
  std::uint32_t order[Items];
  T c[Items], largest = T(-INFINITY);
  bool nan = false;
#pragma unroll
  for (int k = 0; k < Items; ++k) {
    key[k] = ~std::uint64_t(0);  // behind the pairs, even behind equal ones: the sort is stable
    order[k] = static_cast<std::uint32_t>(base + k);
    if (k < valid) {
      key[k] = load_key<std::uint64_t>(args.scores, args.score_type, base + k, nan);
      const T similarity = load<T>(args.similarity, args.similarity_type, base + k);
      nan |= is_nan(similarity);
      if (largest < similarity) largest = similarity;
    }
  }
  const T poison = __syncthreads_or(nan) ? T(NAN) : T(0);
  largest = block_max<Block>(largest, scratch.maxima);
  typename Work::Sort(shared.sort).StableSort(key, order, Less());
  __syncthreads();

  shared.edge[threadIdx.x] = key[Items - 1];
  __syncthreads();
  const std::uint64_t previous = threadIdx.x ? shared.edge[threadIdx.x - 1] : 0;
  __syncthreads();
  bool head[Items];
  int heads = 0, runs = 0;
#pragma unroll
  for (int k = 0; k < Items; ++k) {
    head[k] = k < valid && (base + k == 0 || key[k] != (k ? key[k ? k - 1 : 0] : previous));
    heads += head[k];
  }
  typename Work::Count(scratch.count).ExclusiveSum(heads, heads, runs);
  std::int64_t labels[Items];
#pragma unroll
  for (int k = 0; k < Items; ++k) {
    c[k] = T(0);
    labels[k] = 0;
    if (k < valid) {
      if (head[k]) shared.sorted.start[heads++] = static_cast<std::uint16_t>(base + k);
      shared.sorted.run[base + k] = static_cast<std::uint16_t>(heads - 1);
      c[k] = load<T>(args.similarity, args.similarity_type, order[k]);
      if (args.labels && args.angle) labels[k] = args.labels[order[k]];
    }
  }
  if (threadIdx.x == 0) shared.sorted.start[runs] = static_cast<std::uint16_t>(n);
  __syncthreads();

  Work work{args, shared.sorted, scratch, n, runs, valid, base};
  const T tau = static_cast<T>(args.tau), smallest_angle = angle(largest);
  T x[Items], slope[Items] = {}, gradient[Items] = {};
  T total = T(0);
  T* const losses = static_cast<T*>(args.losses);
  T* const grads = static_cast<T*>(args.grads);
#pragma unroll 1  // one copy of the code: it is long, and read once
  for (int part = 0; part < 2; ++part) {
    const bool rank = part == 0;
    if (rank ? args.rank : args.angle) {
#pragma unroll
      for (int k = 0; k < Items; ++k) x[k] = tau * (rank ? c[k] - largest : smallest_angle - angle(c[k]));
      const double weight = rank ? args.rank_weight : args.angle_weight;
      total += static_cast<T>(weight) * work.objective(rank, x, labels, slope);
      const T factor = static_cast<T>(args.tau * weight);
#pragma unroll
      for (int k = 0; k < Items; ++k) gradient[k] += factor * slope[k] * (rank ? T(1) : angle_slope(c[k]));
    }
    if (!args.parts && rank) continue;
    const int row = args.parts ? part : 0;
    if (threadIdx.x == 0) losses[row] = total + poison;
    total = T(0);
    if (!grads) continue;
#pragma unroll
    for (int k = 0; k < Items; ++k) {
      if (k < valid) grads[row * args.n + order[k]] = gradient[k] + poison;
      gradient[k] = T(0);
    }
  }
}

template <class T, int Block, int Items>
void launch(const PairwiseArgs& args, cudaStream_t stream) {
  constexpr auto kernel = one_block<T, Block, Items>;
  constexpr int bytes = sizeof(typename OneBlock<T, Block, Items>::Shared);
  constexpr int all = bytes + sizeof(typename OneBlock<T, Block, Items>::Scratch);
  static_assert(all <= 64 * 1024, "more shared memory than a block of sm_75 can have");
  if (all > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
               "shared memory for the pairwise losses");
  }
  kernel<<<1, Block, bytes, stream>>>(args);
  check_cuda(cudaGetLastError(), "the pairwise losses in one block");
}

}  // namespace

void pairwise_one_block(const PairwiseArgs& args, cudaStream_t stream) {
  if (args.similarity_type == Float::f64) {
    args.n <= 512 ? launch<double, 128, 4>(args, stream) : launch<double, 512, 4>(args, stream);
  } else {
    args.n <= 512 ? launch<float, 128, 4>(args, stream) : launch<float, 1024, 4>(args, stream);
  }
}

}  // namespace raoe
