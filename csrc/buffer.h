// Uninitialised working memory, freed at the end of its scope.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace raoe {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t bytes) {
    if (bytes == 0) return;
    // Large ones in huge pages where the system has them: touching fresh 4 KiB pages would cost more than the scans.
    const std::size_t alignment = bytes >= (std::size_t{4} << 20) ? std::size_t{2} << 20 : 64;
    if (posix_memalign(&data_, alignment, bytes) != 0) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (alignment > 64) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
  Buffer& operator=(Buffer&& other) noexcept {
    void* const mine = data_;
    data_ = other.data_;
    other.data_ = mine;
    return *this;
  }
  ~Buffer() { std::free(data_); }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// Cuts one allocation into arrays: ask for all sizes first, then take the pieces in any order.
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
