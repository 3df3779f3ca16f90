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
    if (bytes < large) {
      data_ = std::malloc(bytes);  // glibc keeps blocks of this size for the next call
      if (data_ == nullptr) throw std::bad_alloc();
      return;
    }
    // In huge pages where the system has them: touching fresh 4 KiB pages would cost more than the scans.
    if (posix_memalign(&data_, std::size_t{2} << 20, bytes) != 0) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise(data_, bytes, MADV_HUGEPAGE);
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
  static constexpr std::size_t large = std::size_t{32} << 20;
  void* data_ = nullptr;
};

// Cuts one allocation into arrays: ask for all of them first; what comes back is each one's offset in bytes.
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
