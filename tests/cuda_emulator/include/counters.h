// What each operation on the stream was: its name, how many bytes of watched memory it read and wrote at least once, and
// of a launch its blocks and their threads. Accesses are seen in builds with -fsanitize=thread, whose calls
// counters.cpp takes in the place of that library.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace emulator {

struct Operation {
  std::string name;
  std::int64_t read, written, blocks;
  unsigned threads;
};

struct Watched {
  std::uintptr_t begin, end;
  std::vector<unsigned char> seen;  // of each byte: 1 it was read, 2 written
};

inline std::vector<Operation> operations;
inline std::vector<Watched> watched;
inline std::int64_t counts[2];

inline void watch(const std::vector<std::int64_t>& ranges) {  // address, bytes, address, bytes ...
  operations.clear();
  watched.clear();
  for (std::size_t k = 0; k < ranges.size(); k += 2) {
    const auto begin = static_cast<std::uintptr_t>(ranges[k]), bytes = static_cast<std::uintptr_t>(ranges[k + 1]);
    watched.push_back({begin, begin + bytes, std::vector<unsigned char>(bytes)});
  }
  counts[0] = counts[1] = 0;
}

inline void access(std::uintptr_t address, std::size_t bytes, bool write) {
  for (Watched& range : watched) {
    if (address < range.begin || address >= range.end) continue;
    for (std::size_t k = address - range.begin; bytes--; ++k) {
      counts[write] += !(range.seen[k] & (1 << write));
      range.seen[k] |= 1 << write;
    }
    return;
  }
}

// What was read and written before counts once more.
inline void forget() {
  for (Watched& range : watched) std::fill(range.seen.begin(), range.seen.end(), 0);
}

// An operation is over. Those that the emulator does in its own way say what a GPU would read and write.
inline void finished(const std::string& name, std::int64_t read, std::int64_t written, std::int64_t blocks = 0,
                     unsigned threads = 0) {
  if (!watched.empty()) operations.push_back({name, read, written, blocks, threads});
  forget();
  counts[0] = counts[1] = 0;
}

}  // namespace emulator
