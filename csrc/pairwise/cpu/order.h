// Ranges of the inputs, and positions of each pair's partners in the sorted order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../team.h"
#include "linear.h"

namespace raoe {

constexpr std::int64_t chunk = 1 << 14;  // pairs per task

template <class T>
struct Extent {
  T low, high;
  bool valid;  // no NaN, and for similarity no infinity
};

template <class T>
RAOE_INLINE Extent<T> extent_of(const T* __restrict values, std::int64_t n, bool finite) {
  constexpr int lanes = 16;
  T low[lanes], high[lanes];
  int invalid[lanes] = {};
  for (int k = 0; k < lanes; ++k) low[k] = high[k] = values[0];
  const auto update = [&](std::int64_t i, int k) RAOE_INLINE_LAMBDA {
    const T value = values[i];
    low[k] = value < low[k] ? value : low[k];
    high[k] = value > high[k] ? value : high[k];
    invalid[k] |= finite ? !(value - value == T(0)) : value != value;
  };
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int k = 0; k < lanes; ++k) update(i + k, k);
  }
  for (; i < n; ++i) update(i, 0);
  for (int k = 1; k < lanes; ++k) {
    low[0] = low[k] < low[0] ? low[k] : low[0];
    high[0] = high[k] > high[0] ? high[k] : high[0];
    invalid[0] |= invalid[k];
  }
  return {low[0], high[0], !invalid[0]};
}

template <class T>
Extent<T> extent(const T* values, std::int64_t n, bool finite, Team& team) {
  const std::int64_t tasks = (n + chunk - 1) / chunk;
  std::vector<Extent<T>> parts(static_cast<std::size_t>(tasks));
  team.each(tasks, [&](std::int64_t k) {
    vectorised([&]() RAOE_INLINE_LAMBDA {
      parts[static_cast<std::size_t>(k)] = extent_of(values + k * chunk, std::min(chunk, n - k * chunk), finite);
    });
  });
  Extent<T> total = parts[0];
  for (const Extent<T>& part : parts) {
    total = {std::min(total.low, part.low), std::max(total.high, part.high), total.valid && part.valid};
  }
  return total;
}

// ---- Partners in the rank objective: where their prefix ends and their suffix starts ----

// The current run of equal scores (under "ordinal", a single pair). step() moves to the next run of the order.
struct Run {
  const std::uint8_t* tags;
  std::int64_t n;
  Ties ties;
  std::int64_t first = 0, last = -1, index = -1;
  void step() {
    first = ++last;
    ++index;
    if (ties == Ties::ordinal) return;
    while (last + 1 < n && !(tags[last + 1] & run_start)) ++last;
  }
  // Whether this run and the next `block` runs are single pairs.
  static constexpr int block = 8;
  bool single_for_a_block() const {
    if (first != last || last + block + 1 >= n) return false;
    if (ties == Ties::ordinal) return true;
    std::uint64_t next, after_next;
    std::memcpy(&next, tags + last + 1, block);
    std::memcpy(&after_next, tags + last + 2, block);
    return (next & after_next & ~std::uint64_t{0} / 255 * run_start) == ~std::uint64_t{0} / 255 * run_start;
  }
  void skip_block() {
    first = last += block;
    index += block;
  }
  std::int64_t rank() const { return doubled_rank(ties, first, first, last, index); }
};

// Compute ends and starts: the partners of j are the prefix 0 .. ends[j] - 1, the partners of i are the suffix
// starts[i] .. n - 1. Both are constant in a run and never decrease, so two runs step through the order once.
inline void find_partners(const std::uint8_t* tags, std::int64_t n, Ties ties, std::int64_t threshold,
                          std::uint32_t* ends, std::uint32_t* starts) {
  Run run{tags, n, ties}, partner{tags, n, ties};
  partner.step();
  while (run.last + 1 < n) {
    run.step();
    const std::int64_t bound = run.rank() - threshold;
    while (partner.rank() <= bound) {  // stops before `run`, because threshold >= 1
      for (std::int64_t p = partner.first; p <= partner.last; ++p) starts[p] = static_cast<std::uint32_t>(run.first);
      partner.step();
    }
    for (std::int64_t p = run.first; p <= run.last; ++p) ends[p] = static_cast<std::uint32_t>(partner.first);
    // While all scores are distinct, both runs are single pairs and advance together.
    if (partner.rank() > bound + 2) continue;
    while (run.single_for_a_block() && partner.single_for_a_block()) {
      for (int k = 1; k <= Run::block; ++k) {
        ends[run.first + k] = static_cast<std::uint32_t>(partner.first + k);
        starts[partner.first + k - 1] = static_cast<std::uint32_t>(run.first + k);
      }
      run.skip_block();
      partner.skip_block();
    }
  }
  for (std::int64_t p = partner.first; p < n; ++p) starts[p] = static_cast<std::uint32_t>(n);
}

}  // namespace raoe
