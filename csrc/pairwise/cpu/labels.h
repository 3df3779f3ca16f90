// Ids 0, 1, ... of the labels in ascending order. Ids stay below count() even if another thread changes labels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sort.h"
#include "vector_math.h"

namespace raoe {

inline int bit_length(std::uint64_t value) {
  int bits = 0;
  for (; value; value >>= 1) ++bits;
  return bits;
}

class LabelIds {
 public:
  // Labels in a range of at most `few` integers get their offset from the smallest label as id. Otherwise up to `few`
  // distinct labels are looked up in a small table, and more are sorted.
  LabelIds(const std::int64_t* labels, std::int64_t n, int few, Team& team) : labels_(labels) {
    if (labels == nullptr) return;
    std::int64_t low = labels[0], high = labels[0];
    vectorised([&]() RAOE_INLINE_LAMBDA { range_of(labels, n, low, high); });
    const std::uint64_t range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
    if (range < static_cast<std::uint64_t>(few)) {
      count_ = static_cast<std::uint32_t>(range) + 1;
      low_ = low;
      return;
    }
    memory_ = Buffer(static_cast<std::size_t>(n) * sizeof(std::uint32_t));
    ids_ = memory_.as<std::uint32_t>();
    if (!by_table(n, few)) by_sorting(n, low, range, team);
  }

  std::uint32_t count() const { return count_; }
  // Call this only if count() is more than `few`; otherwise call visit().
  std::uint32_t operator[](std::int64_t i) const { return ids_[i]; }
  // Calls use(id), where id(i) is the id of i's label. The type of `id` depends on the case, so that loops over all
  // pairs need no branch.
  template <class Use>
  void visit(const Use& use) const {
    if (ids_) {
      use([ids = ids_](std::int64_t i) { return ids[i]; });
    } else if (labels_) {
      use([labels = labels_, low = static_cast<std::uint64_t>(low_), last = std::uint64_t{count_ - 1}](std::int64_t i) {
        return static_cast<std::uint32_t>(std::min(static_cast<std::uint64_t>(labels[i]) - low, last));
      });
    } else {
      use([](std::int64_t) { return std::uint32_t{0}; });
    }
  }

 private:
  static RAOE_INLINE void range_of(const std::int64_t* __restrict labels, std::int64_t n, std::int64_t& low,
                                   std::int64_t& high) {
    std::int64_t smallest = low, largest = high;
    for (std::int64_t i = 0; i < n; ++i) {
      smallest = labels[i] < smallest ? labels[i] : smallest;
      largest = labels[i] > largest ? labels[i] : largest;
    }
    low = smallest;
    high = largest;
  }

  bool by_table(std::int64_t n, int few) {
    constexpr int capacity = 64;
    std::int64_t table[capacity];
    int size = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      if (std::find(table, table + size, labels_[i]) != table + size) continue;
      if (size == few || size == capacity) return false;
      table[size++] = labels_[i];
    }
    std::sort(table, table + size);
    for (std::int64_t i = 0; i < n; ++i) {
      ids_[i] = static_cast<std::uint32_t>(std::lower_bound(table, table + size - 1, labels_[i]) - table);
    }
    count_ = static_cast<std::uint32_t>(size);
    return true;
  }

  void by_sorting(std::int64_t n, std::int64_t low, std::uint64_t range, Team& team) {
    using Entry = Item<std::uint64_t>;
    const Buffer memory(2 * static_cast<std::size_t>(n) * sizeof(Entry));
    Entry* const half = memory.as<Entry>();
    const auto key = [labels = labels_, low](std::int64_t i) RAOE_INLINE_LAMBDA {
      return static_cast<std::uint64_t>(labels[i]) - static_cast<std::uint64_t>(low);
    };
    const auto payload = [](std::int64_t i) { return static_cast<std::uint32_t>(i); };
    const Entry* const sorted = radix_sort<std::uint64_t>(key, payload, n, bit_length(range), half, half + n, team);
    count_ = 0;
    for (std::int64_t p = 0; p < n; ++p) {
      count_ += p > 0 && sorted[p].key != sorted[p - 1].key;
      ids_[sorted[p].payload] = count_;
    }
    ++count_;
  }

  const std::int64_t* labels_;
  std::int64_t low_ = 0;
  std::uint32_t count_ = 1;
  std::uint32_t* ids_ = nullptr;
  Buffer memory_;
};

}  // namespace raoe
