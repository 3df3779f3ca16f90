// Threads for one call. They end with the Team, so a process that forks later has no threads that a fork would lose.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace raoe {

class Team {
 public:
  // `threads` counts the calling thread, too. If the system cannot start a thread, the team is smaller.
  explicit Team(int threads) {
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
    }
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() {
    if (workers_.empty()) return;
    post(nullptr, nullptr, 0);
    for (std::thread& worker : workers_) worker.join();
  }

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Run task(0), ..., task(count - 1), each once and in any order, and return when all are done. `task` must
  // not throw.
  template <class Task>
  void each(std::int64_t count, const Task& task) {
    if (workers_.empty() || count <= 1) {
      for (std::int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    post([](const void* context, std::int64_t i) { (*static_cast<const Task*>(context))(i); }, &task, count);
    take();
    wait([this] { return working_.load(std::memory_order_acquire) == 0; });
  }

 private:
  using Run = void (*)(const void*, std::int64_t);

  void post(Run run, const void* context, std::int64_t count) {
    run_ = run;
    context_ = context;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    working_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      round_.fetch_add(1, std::memory_order_release);
    }
    changed_.notify_all();
  }

  void take() {
    for (;;) {
      const std::int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count_) return;
      run_(context_, i);
    }
  }

  void work() {
    for (std::uint64_t seen = 0;; ++seen) {
      wait([&] { return round_.load(std::memory_order_acquire) != seen; });
      if (run_ == nullptr) return;
      take();
      bool last;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        last = working_.fetch_sub(1, std::memory_order_acq_rel) == 1;
      }
      if (last) changed_.notify_all();
    }
  }

  // Spin for a while before sleeping, because the next task usually follows within microseconds.
  template <class Ready>
  void wait(const Ready& ready) {
    for (int i = 0; i < 4000; ++i) {
      if (ready()) return;
#if defined(__x86_64__) && defined(__GNUC__)
      __builtin_ia32_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, ready);
  }

  std::vector<std::thread> workers_;
  Run run_ = nullptr;
  const void* context_ = nullptr;
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::atomic<int> working_{0};
  std::atomic<std::uint64_t> round_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace raoe
