// Uninitialised working memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace raoe {

// Memory that is freed at the end of its scope.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes) {
    if (bytes == 0) return;
    if (bytes < large) {
      data_ = std::malloc(bytes);
      if (data_ == nullptr) throw std::bad_alloc();
      return;
    }
    // Use huge pages if the system has them: touching fresh 4 KiB pages would cost more than the scans.
    if (posix_memalign(&data_, std::size_t{2} << 20, bytes) != 0) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  Buffer& operator=(Buffer&& other) noexcept {
    void* const previous = data_;
    data_ = other.data_;
    other.data_ = previous;
    return *this;
  }
  ~Buffer() { std::free(data_); }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  static constexpr std::size_t large = std::size_t{32} << 20;
  void* data_ = nullptr;
};

// Return memory for one call. A thread keeps a block of up to 4 MiB for its next call: malloc often returns a freed
// block to the system, and the page faults of a new block cost as much as the sort. Larger blocks belong to `own`.
inline char* working_memory(std::size_t bytes, Buffer& own) {
  thread_local Buffer cached;
  thread_local std::size_t capacity = 0;
  if (bytes > (std::size_t{4} << 20)) {
    own = Buffer(bytes);
    return own.as<char>();
  }
  if (bytes > capacity) {
    cached = Buffer(bytes);
    capacity = bytes;
  }
  return cached.as<char>();
}

// Plans one allocation for several arrays. add() returns an array's offset in bytes; bytes() is the size of them all.
class Layout {
 public:
  template <class T>
  std::size_t add(std::int64_t count) {
    const std::size_t offset = bytes_;
    bytes_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return offset;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t bytes_ = 0;
};

}  // namespace raoe
