// Runs CUDA kernels on a CPU, one thread block after the other (all together, where the launch is cooperative), each CUDA
// thread as a fiber that runs until it has to wait. It knows what this project's kernels use and no more. The order in
// which fibers run is chosen by the caller, so that a missing barrier shows as results that depend on it; waiting that
// can never end is an exception. `__shared__` arrays are one for all blocks: cooperative kernels use dynamic ones.
#pragma once

#include <setjmp.h>
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
#define __noinline__
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

// After its first turn a fiber is left and entered by longjmp, which, unlike swapcontext, makes no system call.
struct Fiber {
  ucontext_t first;
  jmp_buf here;
  std::unique_ptr<char[]> stack;
  bool started = false, done = false;
  unsigned shuffles = 0, votes = 0;
};

constexpr std::size_t STACK = 256 * 1024;

struct Block {
  unsigned index = 0;
  std::vector<Fiber> fibers;
  std::vector<Barrier> warps;
  Barrier all;
  unsigned alive = 0, current = 0;
  std::vector<std::uint64_t> exchange[2];
  int vote[2] = {0, 0};
  std::vector<unsigned char> dynamic;
};

inline Block* block = nullptr;
inline const std::function<void()>* body = nullptr;
inline Barrier* grid = nullptr;  // of a cooperative launch
inline unsigned grid_threads = 0;
inline jmp_buf scheduler;
inline bool progress = false;
inline int order = 0;               // 0 ascending, 1 descending, otherwise the seed of a random order
inline int multiprocessors = 132;   // each takes one block of a cooperative launch
inline std::vector<std::unique_ptr<char[]>> stacks;  // free ones

}  // namespace emulator

inline emulator::Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

inline void pause() {
  if (!_setjmp(block->fibers[block->current].here)) _longjmp(scheduler, 1);
}

template <class Expected>
void wait(Barrier& barrier, const Expected& expected) {
  const unsigned generation = barrier.generation;
  ++barrier.arrived;
  progress = true;
  while (barrier.generation == generation) {
    if (barrier.arrived == expected()) {
      barrier.arrived = 0;
      ++barrier.generation;
      progress = true;
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
  (*body)();
  block->fibers[block->current].done = true;
  --block->alive;
  progress = true;
  _longjmp(scheduler, 1);
}

inline void take_turn(Block& of, unsigned thread) {
  block = &of;
  of.current = threadIdx.x = thread;
  blockIdx.x = of.index;
  Fiber& fiber = of.fibers[thread];
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.here, 1);
  fiber.started = true;
  setcontext(&fiber.first);
}

inline void run_blocks(const std::vector<unsigned>& indices, unsigned threads, std::size_t bytes) {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::pair<Block*, unsigned>> turns;
  for (const unsigned index : indices) {
    Block& state = *blocks.emplace_back(new Block);
    state.index = index;
    state.fibers.resize(threads);
    state.warps.resize((threads + 31) / 32);
    for (auto& slots : state.exchange) slots.resize(threads);
    state.alive = threads;
    state.dynamic.assign(bytes + 16, 0xff);  // NaN where nobody has written
    for (unsigned thread = 0; thread < threads; ++thread) {
      Fiber& fiber = state.fibers[thread];
      if (stacks.empty()) stacks.emplace_back(new char[STACK]);
      fiber.stack = std::move(stacks.back());
      stacks.pop_back();
      getcontext(&fiber.first);
      fiber.first.uc_stack.ss_sp = fiber.stack.get();
      fiber.first.uc_stack.ss_size = STACK;
      fiber.first.uc_link = nullptr;
      makecontext(&fiber.first, &enter, 0);
      turns.emplace_back(&state, thread);
    }
  }
  if (order == 1) std::reverse(turns.begin(), turns.end());
  std::mt19937 random(order);
  while (!turns.empty()) {
    if (order > 1) std::shuffle(turns.begin(), turns.end(), random);
    progress = false;
    for (const auto& [state, thread] : turns) take_turn(*state, thread);
    turns.erase(std::remove_if(turns.begin(), turns.end(),
                               [](const auto& turn) { return turn.first->fibers[turn.second].done; }),
                turns.end());
    if (!progress && !turns.empty()) throw std::runtime_error("emulated threads wait for each other for ever");
  }
  for (auto& state : blocks) {
    for (Fiber& fiber : state->fibers) stacks.push_back(std::move(fiber.stack));
  }
  block = nullptr;
}

struct Launch {
  const char* name;
  std::int64_t blocks;
  unsigned threads;
  std::size_t bytes;
  Launch(const char* kernel, std::int64_t grid_size, unsigned block_size, std::size_t shared, const void*)
      : name(kernel), blocks(grid_size), threads(block_size), bytes(shared) {
    if (blocks < 1 || threads % 32 || threads > 1024) throw std::runtime_error("an illegal launch");
    if (bytes > 227 * 1024) throw std::runtime_error("more shared memory than a GPU has");
  }
  void operator()(const std::function<void()>& kernel, bool cooperative = false) const {
    body = &kernel;
    gridDim.x = static_cast<unsigned>(blocks);
    blockDim.x = threads;
    std::vector<unsigned> indices(blocks);
    std::iota(indices.begin(), indices.end(), 0u);
    if (order == 1) std::reverse(indices.begin(), indices.end());
    if (order > 1) std::shuffle(indices.begin(), indices.end(), std::mt19937(order));
    if (cooperative) {
      Barrier barrier;
      grid = &barrier;
      grid_threads = gridDim.x * threads;
      if (blocks > multiprocessors) throw std::runtime_error("a cooperative launch of more blocks than fit");
      run_blocks(indices, threads, bytes);
      grid = nullptr;
    } else {
      for (const unsigned index : indices) run_blocks({index}, threads, bytes);
    }
    finished(name, counts[0], counts[1], blocks, threads);
  }
};

inline unsigned char* dynamic_shared() {
  const auto address = reinterpret_cast<std::uintptr_t>(block->dynamic.data());
  return reinterpret_cast<unsigned char*>((address + 15) / 16 * 16);
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait_for_block(); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(int bits) { return __builtin_ffs(bits); }

namespace cooperative_groups {
struct grid_group {
  void sync() const {
    if (!emulator::grid) throw std::runtime_error("a grid barrier in a launch that is not cooperative");
    emulator::wait(*emulator::grid, [] {
      if (emulator::grid->arrived == emulator::grid_threads) emulator::forget();  // a phase reads and writes anew
      return emulator::grid_threads;
    });
  }
};
inline grid_group this_grid() { return {}; }
}  // namespace cooperative_groups

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
V __shfl_sync(unsigned, V value, int lane) {
  return emulator::shuffle(value, static_cast<unsigned>(lane) % 32);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  unsigned ballot = 0;
  for (unsigned lane = 0; lane < 32; ++lane) ballot |= emulator::shuffle(unsigned(predicate != 0), lane) << lane;
  return ballot;
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
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin, cudaDevAttrMultiProcessorCount };
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
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount ? emulator::multiprocessors : 227 * 1024;
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, std::size_t) {
  *blocks = 1;
  return cudaSuccess;
}
namespace emulator {
template <class Arguments>
cudaError_t launch_together(const char* name, void (*kernel)(Arguments), unsigned blocks, unsigned threads,
                            void** arguments, std::size_t bytes, cudaStream_t) {
  Launch(name, blocks, threads, bytes, nullptr)([&] { kernel(*static_cast<Arguments*>(arguments[0])); }, true);
  return cudaSuccess;
}
}  // namespace emulator

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
struct BlockRadixSort {
  struct TempStorage {
    unsigned char bytes[sizeof(K) * (Block * Items + 1)];
  };
  TempStorage& memory;
  explicit BlockRadixSort(TempStorage& storage) : memory(storage) {}
  void Sort(K (&keys)[Items], V (&values)[Items]) {
    static std::vector<std::pair<K, V>> all(Block * Items);
    for (int k = 0; k < Items; ++k) all[threadIdx.x * Items + k] = {keys[k], values[k]};
    __syncthreads();
    if (threadIdx.x == 0) {
      std::stable_sort(all.begin(), all.end(), [&](const auto& a, const auto& b) { return a.first < b.first; });
      std::memset(&memory, 0xff, sizeof(memory));
    }
    __syncthreads();
    for (int k = 0; k < Items; ++k) std::tie(keys[k], values[k]) = all[threadIdx.x * Items + k];
    __syncthreads();
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
    emulator::finished("radix sort: clear counters", 0, 0);
    emulator::finished("radix sort: clear bins", 0, 0);
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
