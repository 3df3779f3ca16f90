// What the compiler calls at each access to memory under -fsanitize=thread. Compiled without it.
#include "counters.h"

#define SEEN(size)                                                                                              \
  void __tsan_read##size(void* at) { emulator::access(reinterpret_cast<std::uintptr_t>(at), size, false); }            \
  void __tsan_write##size(void* at) { emulator::access(reinterpret_cast<std::uintptr_t>(at), size, true); }            \
  void __tsan_unaligned_read##size(void* at) { __tsan_read##size(at); }                                               \
  void __tsan_unaligned_write##size(void* at) { __tsan_write##size(at); }

extern "C" {
SEEN(1) SEEN(2) SEEN(4) SEEN(8) SEEN(16)
void __tsan_read_range(void* at, std::size_t bytes) { emulator::access(reinterpret_cast<std::uintptr_t>(at), bytes, false); }
void __tsan_write_range(void* at, std::size_t bytes) { emulator::access(reinterpret_cast<std::uintptr_t>(at), bytes, true); }
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
