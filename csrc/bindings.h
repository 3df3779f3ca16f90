// What the bindings of both modules need besides pybind11. Python passes an address as an integer (0: null), an
// enumeration by its number, and a structure field by field.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <type_traits>

#include "pairwise/pairwise.h"

namespace raoe {

// An address from Python, for a parameter or a field that is a pointer.
struct Address {
  std::uintptr_t value = 0;
  template <class T>
  operator T*() const {
    return reinterpret_cast<T*>(value);
  }
};

// Python's other threads run during a call. Conversions of arguments, results and exceptions hold the GIL.
using WithoutGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// Make a function of PairwiseArgs and further arguments one that takes the fields of PairwiseArgs.
template <class Result, class... More>
auto with_pairwise_fields(Result (*function)(const PairwiseArgs&, More...)) {
  return [function](Address similarity, Address scores, Address labels, std::int64_t n, int similarity_type,
                    int score_type, int ties, bool rank, bool angle, bool parts, double tau, std::int64_t threshold,
                    double rank_weight, double angle_weight, Address losses, Address grads,
                    std::conditional_t<std::is_pointer_v<More>, Address, More>... more) {
    return function({similarity, scores, labels, n, Float(similarity_type), Key(score_type), Ties(ties), rank, angle,
                     parts, tau, threshold, rank_weight, angle_weight, losses, grads},
                    more...);
  };
}

}  // namespace raoe

template <>
struct pybind11::detail::type_caster<raoe::Address> {
  PYBIND11_TYPE_CASTER(raoe::Address, const_name("int"));
  bool load(handle source, bool convert) {
    make_caster<std::uintptr_t> number;
    if (!number.load(source, convert)) return false;
    value.value = number;
    return true;
  }
};
