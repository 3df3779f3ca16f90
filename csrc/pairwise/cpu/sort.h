// A stable radix sort of (key, payload) items, least significant digit first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../../buffer.h"
#include "../../simd.h"
#include "../../team.h"

namespace raoe {

template <class K>
struct Item {
  K key;
  std::uint32_t payload;
};

struct Digits {
  int passes, width;
};

// Return the cheapest split of a key with `bits` bits into digits. A pass costs time for each item and counter.
inline Digits digits_for(int bits, std::int64_t n) {
  Digits best{0, 1};
  double lowest_cost = 0;
  for (int width = 4; width <= 11; ++width) {
    const int passes = (bits + width - 1) / width;
    const double cost = passes * (static_cast<double>(n) + 0.6 * (1 << width));
    if (best.width == 1 || cost < lowest_cost) {
      best = {passes, width};
      lowest_cost = cost;
    }
  }
  return best;
}

// Count the `rows` lowest digits of key >> low in counts[row][digit].
template <int rows, class Keys>
RAOE_NOINLINE void count_digits(const Keys key, std::int64_t begin, std::int64_t end, int low, int width,
                                std::uint32_t* __restrict counts) {
  const std::size_t mask = (std::size_t{1} << width) - 1;
  for (std::int64_t i = begin; i < end; ++i) {
    const auto bits = key(i) >> low;
    for (int row = 0; row < rows; ++row) ++counts[(static_cast<std::size_t>(row) << width) + (bits >> row * width & mask)];
  }
}

// Replace counts[part][digit] by the first place for items of this part and digit. Places go by digit, then by part.
RAOE_NOINLINE inline void counts_to_places(std::uint32_t* counts, std::size_t buckets, int parts) {
  std::uint32_t place = 0;
  for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
    std::uint32_t* count = counts + bucket;
    for (int part = 0; part < parts; ++part, count += buckets) {
      const std::uint32_t bucket_size = *count;
      *count = place;
      place += bucket_size;
    }
  }
}

// Move each item to the next place of its digit.
template <class K, class Items>
RAOE_NOINLINE void place(const Items item, std::int64_t begin, std::int64_t end, int shift, K mask,
                         std::uint32_t* __restrict next, Item<K>* __restrict target) {
  for (std::int64_t i = begin; i < end; ++i) {
    const Item<K> current = item(i);
    target[next[(current.key >> shift) & mask]++] = current;
  }
}

// Sort (key(i), payload(i)), i = 0, ..., n - 1, by the digits of key >> low, and return `a` or `b`, whichever holds the
// result. key(i) must return the same value at every call, or places would be out of range. It may read keys from `b`.
template <class K, class Keys, class Payloads>
Item<K>* sort_digits(const Keys& key, const Payloads& payload, std::int64_t n, int low, Digits digits, Item<K>* a,
                     Item<K>* b, Team& team) {
  const int width = digits.width, parts = team.size();
  const std::size_t buckets = std::size_t{1} << width;
  const K mask = static_cast<K>(buckets - 1);
  const auto first = [key, payload](std::int64_t i) { return Item<K>{key(i), payload(i)}; };
  if (digits.passes == 0) {
    for (std::int64_t i = 0; i < n; ++i) a[i] = first(i);
    return a;
  }
  // A single part counts all digits at once. Several parts count each digit before its pass, because passes move
  // items between parts.
  const int digits_at_once = parts == 1 ? digits.passes : 1;
  const std::size_t counters = buckets * static_cast<std::size_t>(digits_at_once * parts);
  Buffer memory(counters * sizeof(std::uint32_t));
  std::uint32_t* const counts = memory.as<std::uint32_t>();
  if (parts == 1) {
    std::memset(counts, 0, counters * sizeof(std::uint32_t));
    int pass = 0;
    for (; pass + 2 <= digits.passes; pass += 2) {
      count_digits<2>(key, 0, n, low + pass * width, width, counts + buckets * static_cast<std::size_t>(pass));
    }
    if (pass < digits.passes) {
      count_digits<1>(key, 0, n, low + pass * width, width, counts + buckets * static_cast<std::size_t>(pass));
    }
  }
  const Item<K>* source = nullptr;  // null: the items are still given by key and payload
  const auto begin = [&](std::int64_t part) { return n * part / parts; };
  Item<K>*target = a, *other = b;
  for (int pass = 0; pass < digits.passes; ++pass) {
    const int shift = low + pass * width;
    const auto source_item = [source](std::int64_t i) { return source[i]; };
    std::uint32_t* const rows = counts + (parts == 1 ? buckets * static_cast<std::size_t>(pass) : 0);
    if (parts > 1) {
      team.each(parts, [&](std::int64_t part) {
        std::uint32_t* const row = rows + buckets * static_cast<std::size_t>(part);
        std::memset(row, 0, buckets * sizeof(std::uint32_t));
        if (source) {
          const auto source_key = [source](std::int64_t i) { return source[i].key; };
          count_digits<1>(source_key, begin(part), begin(part + 1), shift, width, row);
        } else {
          count_digits<1>(key, begin(part), begin(part + 1), shift, width, row);
        }
      });
    }
    if (source) {
      const std::uint32_t* at = rows + ((source[0].key >> shift) & mask);
      std::int64_t equal_digits = 0;
      for (int part = 0; part < parts; ++part, at += buckets) equal_digits += *at;
      if (equal_digits == n) continue;  // all items have the same digit
    }
    counts_to_places(rows, buckets, parts);
    team.each(parts, [&](std::int64_t part) {
      std::uint32_t* const row = rows + buckets * static_cast<std::size_t>(part);
      if (source) {
        place<K>(source_item, begin(part), begin(part + 1), shift, mask, row, target);
      } else {
        place<K>(first, begin(part), begin(part + 1), shift, mask, row, target);
      }
    });
    source = target;
    std::swap(target, other);
  }
  return const_cast<Item<K>*>(source);
}

// Finish the sort of items that are sorted only by their high bits. Returns false if this would take too long. The
// order of the items is then unspecified.
template <class K>
bool insertion_sort(Item<K>* items, std::int64_t n) {
  std::int64_t budget = n;
  for (std::int64_t p = 1; p < n; ++p) {
    if (!(items[p].key < items[p - 1].key)) continue;
    const Item<K> current = items[p];
    std::int64_t q = p;
    for (; q > 0 && current.key < items[q - 1].key; --q) {
      items[q] = items[q - 1];
      if (--budget < 0) return false;
    }
    items[q] = current;
  }
  return true;
}

// Sort like sort_digits, by the whole key, which has at most `bits` significant bits. The caller's data may change
// during the sort, so keys and payloads are read once: keys are copied to the half that the first pass does not use.
template <class K, class Keys, class Payloads>
Item<K>* radix_sort(const Keys& key, const Payloads& payload, std::int64_t n, int bits, Item<K>* a, Item<K>* b,
                    Team& team) {
  K* const keys = reinterpret_cast<K*>(b);
  const auto key_copy = [keys](std::int64_t i) { return keys[i]; };
  const auto sort = [&](int low, Digits digits) {
    const std::int64_t parts = team.size();
    team.each(parts, [&](std::int64_t part) {
      vectorised([&]() RAOE_INLINE_LAMBDA {
        for (std::int64_t i = n * part / parts; i < n * (part + 1) / parts; ++i) keys[i] = key(i);
      });
    });
    return sort_digits<K>(key_copy, payload, n, low, digits, a, b, team);
  };
  // Two digits usually suffice to order few pairs. An insertion sort then handles the remaining digits.
  const int width = n <= 512 ? 8 : n <= 2048 ? 9 : n <= 4096 ? 10 : 11;
  if (n <= (1 << 16) && bits > 2 * width) {
    Item<K>* const sorted = sort(bits - 2 * width, {2, width});
    if (insertion_sort(sorted, n)) return sorted;
  }
  return sort(0, digits_for(bits, n));
}

}  // namespace raoe
