// Stable radix sort of (key, payload) items, least significant digit first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../buffer.h"
#include "../team.h"

namespace raoe {

template <class K>
struct Item {
  K key;
  std::uint32_t payload;
};

struct Digits {
  int passes, width;
};

// The cheapest split of a key of `bits` bits into digits: a pass costs its items and its counters.
inline Digits digits_for(int bits, std::int64_t n) {
  Digits best{0, 1};
  double least = 0;
  for (int width = 4; width <= 11; ++width) {
    const int passes = (bits + width - 1) / width;
    const double cost = passes * (static_cast<double>(n) + 0.6 * (1 << width));
    if (best.width == 1 || cost < least) {
      best = {passes, width};
      least = cost;
    }
  }
  return best;
}

// Sorts load(0), ..., load(n - 1) by key >> low, for keys of at most `bits` significant bits, and returns `a`
// or `b`, wherever the result is. `load` is called more than once for an i.
template <class K, class Load>
Item<K>* sort_digits(const Load& load, std::int64_t n, int low, Digits digits, Item<K>* a, Item<K>* b, Team& team) {
  const int width = digits.width, parts = team.size();
  const std::size_t buckets = std::size_t{1} << width;
  const K mask = static_cast<K>(buckets - 1);
  if (digits.passes == 0) {
    for (std::int64_t i = 0; i < n; ++i) a[i] = load(i);
    return a;
  }
  // One part counts all digits at once; more parts count each before its pass, because passes move items
  // across parts.
  const int at_once = parts == 1 ? digits.passes : 1;
  Buffer memory(buckets * static_cast<std::size_t>(at_once * parts) * sizeof(std::uint32_t));
  std::uint32_t* const counts = memory.as<std::uint32_t>();
  if (parts == 1) {
    std::memset(counts, 0, buckets * static_cast<std::size_t>(at_once) * sizeof(std::uint32_t));
    for (std::int64_t i = 0; i < n; ++i) {
      const K key = load(i).key;
      std::uint32_t* row = counts;
      int shift = low;
      for (int pass = 0; pass < digits.passes; ++pass, shift += width, row += buckets) ++row[(key >> shift) & mask];
    }
  }
  const Item<K>* source = nullptr;  // null: the input itself
  const auto item = [&](std::int64_t i) { return source ? source[i] : load(i); };
  const auto begin = [&](std::int64_t part) { return n * part / parts; };
  Item<K>*target = a, *other = b;
  for (int pass = 0; pass < digits.passes; ++pass) {
    const int shift = low + pass * width;
    std::uint32_t* const rows = counts + (parts == 1 ? buckets * static_cast<std::size_t>(pass) : 0);
    if (parts > 1) {
      team.each(parts, [&](std::int64_t part) {
        std::uint32_t* const row = rows + buckets * static_cast<std::size_t>(part);
        std::memset(row, 0, buckets * sizeof(std::uint32_t));
        for (std::int64_t i = begin(part), end = begin(part + 1); i < end; ++i) ++row[(item(i).key >> shift) & mask];
      });
    }
    std::uint32_t position = 0;
    bool constant = false;
    for (std::size_t bucket = 0; bucket < buckets; ++bucket) {
      const std::uint32_t before = position;
      for (int part = 0; part < parts; ++part) {
        std::uint32_t& count = rows[buckets * static_cast<std::size_t>(part) + bucket];
        const std::uint32_t here = count;
        count = position;
        position += here;
      }
      constant |= position - before == static_cast<std::uint32_t>(n);
    }
    if (constant && source) continue;  // the digit orders nothing
    team.each(parts, [&](std::int64_t part) {
      std::uint32_t* const row = rows + buckets * static_cast<std::size_t>(part);
      const std::int64_t first = begin(part), end = begin(part + 1);
      if (source) {
        for (std::int64_t i = first; i < end; ++i) target[row[(source[i].key >> shift) & mask]++] = source[i];
      } else {
        for (std::int64_t i = first; i < end; ++i) {
          const Item<K> next = load(i);
          target[row[(next.key >> shift) & mask]++] = next;
        }
      }
    });
    source = target;
    std::swap(target, other);
  }
  return const_cast<Item<K>*>(source);
}

// Finishes what is sorted by the high bits alone. False if it would take long; the items are then in some
// other order.
template <class K>
bool insertion_sort(Item<K>* items, std::int64_t n) {
  std::int64_t budget = n;
  for (std::int64_t p = 1; p < n; ++p) {
    if (!(items[p].key < items[p - 1].key)) continue;
    const Item<K> moved = items[p];
    std::int64_t q = p;
    for (; q > 0 && moved.key < items[q - 1].key; --q) {
      items[q] = items[q - 1];
      if (--budget < 0) return false;
    }
    items[q] = moved;
  }
  return true;
}

// As above, by all of the key.
template <class K, class Load>
Item<K>* radix_sort(const Load& load, std::int64_t n, int bits, Item<K>* a, Item<K>* b, Team& team) {
  // A few pairs seldom need all their digits to be told apart: two digits, and a look at the rest.
  const int width = n <= 512 ? 8 : n <= 2048 ? 9 : n <= 4096 ? 10 : 11;
  if (n <= (1 << 16) && bits > 2 * width) {
    Item<K>* const sorted = sort_digits<K>(load, n, bits - 2 * width, {2, width}, a, b, team);
    if (insertion_sort(sorted, n)) return sorted;
  }
  return sort_digits<K>(load, n, 0, digits_for(bits, n), a, b, team);
}

}  // namespace raoe
