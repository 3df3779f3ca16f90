// Runs CUDA kernels on a CPU, one thread block after the other, each CUDA thread as a fiber that runs until it has to
// wait. It knows what this project's kernels use and no more. The order in which fibers run is chosen by the caller, so
// that a missing barrier shows as results that depend on it; waiting that can never end is an exception.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "counters.h"

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

namespace emulator {

struct Index {
  unsigned x;
};

struct Barrier {
  unsigned arrived = 0, generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  unsigned shuffles = 0, votes = 0;
};

constexpr std::size_t STACK = 128 * 1024;

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Barrier> warps;
  Barrier all;
  unsigned alive = 0, current = 0;
  bool progress = false;
  ucontext_t scheduler;
  std::vector<std::uint64_t> exchange[2];
  int vote[2] = {0, 0};
  std::function<void()> body;
  std::vector<unsigned char> dynamic;
};

inline Block* block = nullptr;
inline int order = 0;  // 0 ascending, 1 descending, otherwise the seed of a random order

}  // namespace emulator

inline emulator::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

inline void pause() {
  const unsigned me = block->current;
  swapcontext(&block->fibers[me].context, &block->scheduler);
}

inline void wait(Barrier& barrier, const std::function<unsigned()>& expected) {
  const unsigned generation = barrier.generation;
  ++barrier.arrived;
  block->progress = true;
  while (barrier.generation == generation) {
    if (barrier.arrived == expected()) {
      barrier.arrived = 0;
      ++barrier.generation;
      block->progress = true;
      return;
    }
    pause();
  }
}

inline void wait_for_block() {
  wait(block->all, [] { return block->alive; });
}

template <class V>
V shuffle(V value, unsigned lane) {
  static_assert(sizeof(V) <= 8, "one exchange slot");
  const unsigned me = block->current, warp = me / 32;
  auto& slots = block->exchange[block->fibers[me].shuffles++ % 2];  // two: one barrier a shuffle is then enough
  std::memcpy(&slots[me], &value, sizeof(V));
  wait(block->warps[warp], [] { return 32u; });
  std::memcpy(&value, &slots[warp * 32 + lane], sizeof(V));
  return value;
}

inline void enter() {
  block->body();
  Fiber& fiber = block->fibers[block->current];
  fiber.done = true;
  --block->alive;
  block->progress = true;
  swapcontext(&fiber.context, &block->scheduler);
}

inline void run_block(unsigned threads, std::size_t bytes, const std::function<void()>& body) {
  Block state;
  block = &state;
  state.fibers.resize(threads);
  state.warps.resize((threads + 31) / 32);
  for (auto& slots : state.exchange) slots.resize(threads);
  state.alive = threads;
  state.body = body;
  state.dynamic.assign(bytes + 16, 0xff);  // NaN where nobody has written
  for (Fiber& fiber : state.fibers) {
    fiber.stack.reset(new char[STACK]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, &enter, 0);
  }
  std::vector<unsigned> turns(threads);
  std::iota(turns.begin(), turns.end(), 0u);
  if (order == 1) std::reverse(turns.begin(), turns.end());
  std::mt19937 random(order);
  while (state.alive) {
    if (order > 1) std::shuffle(turns.begin(), turns.end(), random);
    state.progress = false;
    for (const unsigned turn : turns) {
      if (state.fibers[turn].done) continue;
      state.current = threadIdx.x = turn;
      swapcontext(&state.scheduler, &state.fibers[turn].context);
    }
    if (!state.progress) throw std::runtime_error("emulated threads wait for each other for ever");
  }
  block = nullptr;
}

struct Launch {
  const char* name;
  std::int64_t grid;
  unsigned threads;
  std::size_t bytes;
  Launch(const char* kernel, std::int64_t blocks, unsigned block_size, std::size_t shared, const void*)
      : name(kernel), grid(blocks), threads(block_size), bytes(shared) {
    if (blocks < 1 || block_size % 32 || block_size > 1024) throw std::runtime_error("an illegal launch");
  }
  void operator()(const std::function<void()>& body) const {
    gridDim.x = static_cast<unsigned>(grid);
    blockDim.x = threads;
    std::vector<unsigned> blocks(grid);
    std::iota(blocks.begin(), blocks.end(), 0u);
    if (order == 1) std::reverse(blocks.begin(), blocks.end());
    if (order > 1) std::shuffle(blocks.begin(), blocks.end(), std::mt19937(order));
    for (const unsigned index : blocks) {
      blockIdx.x = index;
      run_block(threads, bytes, body);
    }
    finished(name, counts[0], counts[1], grid, threads);
  }
};

inline unsigned char* dynamic_shared() {
  const auto address = reinterpret_cast<std::uintptr_t>(block->dynamic.data());
  return reinterpret_cast<unsigned char*>((address + 15) / 16 * 16);
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait_for_block(); }

inline int __syncthreads_or(int predicate) {
  auto& me = emulator::block->fibers[emulator::block->current];
  int& vote = emulator::block->vote[me.votes++ % 2];
  int& next = emulator::block->vote[me.votes % 2];
  vote |= predicate != 0;
  emulator::wait_for_block();
  const int result = vote;
  emulator::wait_for_block();
  next = 0;
  emulator::wait_for_block();
  return result;
}

template <class V>
V __shfl_xor_sync(unsigned, V value, int mask) {
  return emulator::shuffle(value, (threadIdx.x % 32) ^ static_cast<unsigned>(mask));
}
template <class V>
V __shfl_up_sync(unsigned, V value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return emulator::shuffle(value, lane >= distance ? lane - distance : lane);
}
template <class V>
V __shfl_down_sync(unsigned, V value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return emulator::shuffle(value, lane + distance < 32 ? lane + distance : lane);
}

// ---- The runtime API. ----

using cudaStream_t = struct EmulatedStream*;
enum cudaError_t { cudaSuccess = 0, cudaErrorNoKernelImageForDevice = 209 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
struct cudaFuncAttributes {};
namespace emulator {
inline bool foreign = false;  // the module was not compiled for this GPU
inline cudaError_t last_error = cudaSuccess;
inline cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
}  // namespace emulator
inline const char* cudaGetErrorString(cudaError_t error) { return error ? "no kernel image" : "no error"; }
inline cudaError_t cudaGetLastError() { return std::exchange(emulator::last_error, cudaSuccess); }
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, emulator::capture_mode);
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel*) {
  if (emulator::capture_mode != cudaStreamCaptureModeRelaxed) throw std::runtime_error("a load that breaks a capture");
  return emulator::last_error = emulator::foreign ? cudaErrorNoKernelImageForDevice : cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  emulator::finished("memset", 0, static_cast<std::int64_t>(bytes));
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int bytes) {
  if (bytes > 99 * 1024) throw std::runtime_error("more shared memory than a GPU has");
  return cudaSuccess;
}

// ---- 16-bit floats. ----

using __half = _Float16;
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half __float2half_rn(float x) { return static_cast<__half>(x); }
struct __nv_bfloat16 {
  std::uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {0x7fc0};
  return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// ---- What is used of CUB. ----

namespace cub {

template <class K, int Block, int Items, class V>
struct BlockMergeSort {
  struct TempStorage {
    unsigned char bytes[sizeof(K) * (Block * Items + 1)];
  };
  TempStorage& memory;
  explicit BlockMergeSort(TempStorage& storage) : memory(storage) {}
  template <class Less>
  void StableSort(K (&keys)[Items], V (&values)[Items], Less less) {
    static std::vector<std::pair<K, V>> all(Block * Items);
    for (int k = 0; k < Items; ++k) all[threadIdx.x * Items + k] = {keys[k], values[k]};
    __syncthreads();
    if (threadIdx.x == 0) {
      std::stable_sort(all.begin(), all.end(), [&](const auto& a, const auto& b) { return less(a.first, b.first); });
      std::memset(&memory, 0xff, sizeof(memory));
    }
    __syncthreads();
    for (int k = 0; k < Items; ++k) std::tie(keys[k], values[k]) = all[threadIdx.x * Items + k];
    __syncthreads();
  }
};

template <class V, int Block>
struct BlockScan {
  struct TempStorage {
    V values[Block];
  };
  TempStorage& memory;
  explicit BlockScan(TempStorage& storage) : memory(storage) {}
  void ExclusiveSum(V value, V& before, V& total) {
    memory.values[threadIdx.x] = value;
    __syncthreads();
    V sum = 0;
    for (unsigned t = 0; t < Block; ++t) {
      if (t == threadIdx.x) before = sum;
      sum += memory.values[t];
    }
    total = sum;
  }
  void ExclusiveSum(V value, V& before) {
    V total;
    ExclusiveSum(value, before, total);
  }
};

template <class V>
struct DoubleBuffer {
  V* buffers[2];
  int selector = 0;
  DoubleBuffer(V* current, V* alternate) : buffers{current, alternate} {}
  V* Current() { return buffers[selector]; }
  V* Alternate() { return buffers[1 - selector]; }
};

struct DeviceRadixSort {
  template <class K, class V>
  static cudaError_t SortPairs(void* temporary, std::size_t& bytes, DoubleBuffer<K>& keys, DoubleBuffer<V>& values,
                               std::uint32_t n, int = 0, int = 8 * sizeof(K), cudaStream_t = nullptr) {
    if (!temporary) {
      bytes = 1000;
      return cudaSuccess;
    }
    std::vector<std::uint32_t> index(n);
    std::iota(index.begin(), index.end(), 0u);
    const K* key = keys.Current();
    std::stable_sort(index.begin(), index.end(), [&](std::uint32_t a, std::uint32_t b) { return key[a] < key[b]; });
    for (std::uint32_t p = 0; p < n; ++p) {
      keys.Alternate()[p] = keys.Current()[index[p]];
      values.Alternate()[p] = values.Current()[index[p]];
    }
    std::memset(keys.Current(), 0xff, n * sizeof(K));
    std::memset(values.Current(), 0xff, n * sizeof(V));
    keys.selector ^= 1;
    values.selector ^= 1;
    // CUB's own way (InvokeOnesweep): a histogram of all digits, their sums, and a pass for each digit of 8 bits.
    const std::int64_t moved = std::int64_t(n) * (sizeof(K) + sizeof(V));
    for (const char* cleared : {"counters", "bins"}) emulator::finished(std::string("radix sort: clear ") + cleared, 0, 0);
    emulator::finished("radix sort: histogram", std::int64_t(n) * sizeof(K), 0);
    emulator::finished("radix sort: sums", 0, 0);
    for (std::size_t digit = 0; digit < sizeof(K); ++digit) {
      emulator::finished("radix sort: clear look-back", 0, 0);
      emulator::finished("radix sort: pass", moved, moved);
    }
    return cudaSuccess;
  }
};

}  // namespace cub
