// What the emulated module has besides csrc's own functions; between csrc/bindings.h and its use.
#pragma once

#include "emulator.h"

namespace emulator {

inline void schedule(int chosen, int blocks) { order = chosen, multiprocessors = blocks; }

inline const char* done() {
  static std::string lines;
  lines.clear();
  for (const Operation& each : operations) {
    for (const auto number : {each.read, each.written, each.blocks, std::int64_t{each.threads}}) {
      lines += std::to_string(number) + " ";
    }
    lines += each.name + "\n";
  }
  return lines.c_str();
}

inline void define(pybind11::module_& module) {
  module.def("schedule", &schedule);
  module.def("watch", &watch);
  module.def("operations", &done);
}

}  // namespace emulator
