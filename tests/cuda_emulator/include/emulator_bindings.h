// What the emulated module has besides csrc's own functions.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "emulator.h"

namespace emulator {

inline void define(pybind11::module_& module) {
  module.def("schedule", [](int chosen, int blocks) { order = chosen, multiprocessors = blocks; });
  module.def("watch", &watch);
  module.def("operations", [] {
    pybind11::list all;
    for (const Operation& done : operations) {
      all.append(pybind11::make_tuple(done.name, done.read, done.written, done.blocks, done.threads));
    }
    return all;
  });
}

}  // namespace emulator
