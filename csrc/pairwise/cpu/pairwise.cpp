// The pairwise losses on the CPU: one sort by score, then a few passes over the pairs in that order.
//
//   sort   (score, index and label)            -> `order`, `tags`, and c in sorted order
//   terms  exp(x) of both objectives           -> linear.h
//   sums   P and Q, prefix and suffix sums
//   combine  Z, the loss and the gradient, which is scattered back to the caller's order
//
// The sort runs once, the other steps once for each row of similarities.
//
// If sums of exponentials exceed the range of double, general.h replaces the steps "sums" and "combine". For more than
// 16 distinct labels, it replaces the sums of the angular objective.
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "../pairwise.h"
#include "general.h"
#include "labels.h"
#include "linear.h"
#include "order.h"

namespace raoe {
namespace {

constexpr std::int64_t pairs_a_thread = 1 << 15;  // with fewer pairs, starting a thread costs more than it saves
constexpr int index_bits = 28;               // a payload is index | label id << 28
constexpr std::uint32_t index_mask = (1u << index_bits) - 1;

// ---- One call ----

struct Results {
  double rank_loss = 0, angle_loss = 0;
  double rank_scale = 0, angle_scale = 0;  // factors of the gradients, applied when they are stored
};

// One row of similarities and the addresses of its results. A result of the angular part is stored `to_angle` losses
// (or rows of gradients) after the same result of the rank part.
template <class C>
struct Row {
  const C* similarity;
  C* losses;
  C* grads;
  std::int64_t to_angle;
  Extent<C> extent;
};

// C: type of similarity and of the results. T: type of exp(x) and of the unscaled gradients.
template <class C, class T, class K>
class Call {
 public:
  Call(const PairwiseArgs& args, const LabelIds& ids, Team& team)
      : args_(args), ids_(ids), n_(args.n), grad_(args.grads != nullptr), team_(team) {}

  // Sort by key(i), which has at most `key_bits` bits, with payload(i) = i | label id << index_bits.
  template <class Keys, class Payloads>
  void sort(const Keys& key, int key_bits, const Payloads& payload) {
    allocate();
    sorted_ = radix_sort<K>(key, payload, n_, key_bits, items_, items_ + n_, team_);
  }

  // `log`: store exponents instead of exponentials, and logarithms of sums. T must then be double.
  void run(const Row<C>& row, bool log) {
    unpack_and_terms(row, log);
    if (!unpacked_) {
      if (args_.rank) find_partners(tags_, n_, args_.ties, args_.threshold, ends_, starts_);
      cut();
      unpacked_ = true;
    }
    Results results;
    if (log) {
      if constexpr (std::is_same<T, double>::value) log_sums(results);
    } else {
      if (args_.rank) rank_sums();
      if (args_.angle) angle_sums();
      combine(results);
    }
    store(row, results);
  }

 private:
  void allocate() {
    Layout layout;
    const std::int64_t rank = args_.rank ? n_ : 0, angle = args_.angle ? n_ : 0;
    const std::size_t items = layout.add<Item<K>>(2 * n_);
    const std::size_t order = layout.add<std::uint32_t>(n_), tags = layout.add<std::uint8_t>(n_);
    const std::size_t ends = layout.add<std::uint32_t>(rank), starts = layout.add<std::uint32_t>(rank);
    const std::size_t c = layout.add<C>(n_), rank_x = layout.add<T>(rank), angle_x = layout.add<T>(angle);
    const std::size_t below = layout.add<T>(angle), above = layout.add<T>(grad_ ? angle : 0);
    // Half of the items' memory is free after sorting: exp(y) of both objectives is stored there if it fits.
    const bool y_fits = 2 * sizeof(T) <= sizeof(Item<K>);
    const std::size_t rank_y = layout.add<T>(y_fits ? 0 : rank), angle_y = layout.add<T>(y_fits ? 0 : angle);
    const std::size_t after = layout.add<double>(grad_ && args_.rank ? n_ + 1 : 0);
    char* const base = working_memory(layout.bytes(), memory_);
    items_ = reinterpret_cast<Item<K>*>(base + items);
    order_ = reinterpret_cast<std::uint32_t*>(base + order);
    tags_ = reinterpret_cast<std::uint8_t*>(base + tags);
    ends_ = reinterpret_cast<std::uint32_t*>(base + ends);
    starts_ = reinterpret_cast<std::uint32_t*>(base + starts);
    c_ = reinterpret_cast<C*>(base + c);
    rank_x_ = reinterpret_cast<T*>(base + rank_x);
    angle_x_ = reinterpret_cast<T*>(base + angle_x);
    below_ = reinterpret_cast<T*>(base + below);
    above_ = reinterpret_cast<T*>(base + above);
    rank_y_ = reinterpret_cast<T*>(base + rank_y);
    angle_y_ = reinterpret_cast<T*>(base + angle_y);
    before_ = nullptr;  // set by unpack_and_terms
    after_ = reinterpret_cast<double*>(base + after);
  }

  void unpack_and_terms(const Row<C>& row, bool log) {
    Item<K>* const sorted = sorted_;
    // For the first row, this step is the last that reads the sorted items. So the prefix
    // sums reuse their memory, and the exponentials reuse the other half of the items.
    before_ = reinterpret_cast<double*>(sorted);
    if (2 * sizeof(T) <= sizeof(Item<K>)) {
      rank_y_ = reinterpret_cast<T*>(sorted == items_ ? items_ + n_ : items_);
      angle_y_ = rank_y_ + n_;
    }
    const double low = row.extent.low, high = row.extent.high, tau = args_.tau;
    const double middle = 0.5 * low + 0.5 * high;
    const double middle_angle = 0.5 * angle(static_cast<double>(clip(row.extent.low))) +
                                0.5 * angle(static_cast<double>(clip(row.extent.high)));
    const std::int64_t tasks = (n_ + chunk - 1) / chunk;
    team_.each(tasks, [&](std::int64_t k) {
      const std::int64_t begin = k * chunk, end = std::min(n_, begin + chunk);
      if (unpacked_) {
        gather(row.similarity, order_, begin, end, c_);
      } else {
        unpack(sorted, begin, end, row.similarity, order_, tags_, c_);
      }
      if (log) {
        for (std::int64_t p = begin; p < end; ++p) {
          if (args_.rank) rank_x_[p] = static_cast<T>(bounded(tau * (c_[p] - middle)));
          if (args_.angle) {
            angle_x_[p] = static_cast<T>(bounded(tau * (middle_angle - angle(static_cast<double>(clip(c_[p]))))));
          }
        }
        return;
      }
      vectorised([&]() RAOE_INLINE_LAMBDA {
        if (args_.rank) rank_terms(c_ + begin, rank_x_ + begin, rank_y_ + begin, end - begin, tau, middle);
        if (args_.angle) {
          angle_terms(c_ + begin, angle_x_ + begin, angle_y_ + begin, end - begin, tau, middle_angle);
        }
      });
    });
  }

  static RAOE_NOINLINE void unpack(const Item<K>* __restrict sorted, std::int64_t begin, std::int64_t end,
                                   const C* __restrict similarity, std::uint32_t* __restrict order,
                                   std::uint8_t* __restrict tags, C* __restrict c) {
    K before = begin == 0 ? static_cast<K>(~sorted[0].key) : sorted[begin - 1].key;
    for (std::int64_t p = begin; p < end; ++p) {
      const Item<K> item = sorted[p];
      const std::uint32_t i = item.payload & index_mask;
      order[p] = i;
      c[p] = similarity[i];
      tags[p] = static_cast<std::uint8_t>(item.payload >> index_bits | (item.key != before ? run_start : 0));
      before = item.key;
    }
  }

  static RAOE_NOINLINE void gather(const C* __restrict similarity, const std::uint32_t* __restrict order,
                                   std::int64_t begin, std::int64_t end, C* __restrict c) {
    for (std::int64_t p = begin; p < end; ++p) c[p] = similarity[order[p]];
  }

  std::uint32_t label_at(std::int64_t p) const {
    return ids_.count() <= max_classes ? tags_[p] & label_bits : ids_[order_[p]];
  }

  // Cut the order into chunks that consist of whole runs.
  void cut() {
    for (std::int64_t begin = 0; begin < n_;) {
      std::int64_t end = std::min(n_, begin + chunk);
      while (end < n_ && !(tags_[end] & run_start)) ++end;
      chunks_.push_back({begin, end});
      begin = end;
    }
  }
  template <class Task>
  void each_chunk(const Task& task) {
    team_.each(static_cast<std::int64_t>(chunks_.size()), [&](std::int64_t k) {
      vectorised([&]() RAOE_INLINE_LAMBDA { task(static_cast<std::size_t>(k), chunks_[static_cast<std::size_t>(k)]); });
    });
  }

  void rank_sums() {
    const std::size_t count = chunks_.size();
    std::vector<RankSums> totals(count), carries(count);
    if (count > 1) {
      each_chunk([&](std::size_t k, Range r) RAOE_INLINE_LAMBDA {
        totals[k] = rank_total(rank_x_ + r.begin, rank_y_ + r.begin, r.end - r.begin);
      });
    }
    for (std::size_t k = 1; k < count; ++k) carries[k].x = carries[k - 1].x + totals[k - 1].x;
    for (std::size_t k = count - 1; k-- > 0;) carries[k].y = carries[k + 1].y + totals[k + 1].y;
    each_chunk([&](std::size_t k, Range r) RAOE_INLINE_LAMBDA {
      rank_sweep(rank_x_ + r.begin, rank_y_ + r.begin, r.end - r.begin, carries[k], before_ + r.begin,
                 grad_ ? after_ + r.begin : nullptr);
    });
    if (grad_) after_[n_] = 0;
  }

  void angle_sums() {
    const std::uint32_t classes = ids_.count();
    if (classes > max_classes) {
      const Buffer tree((std::size_t{classes} + 1) * sizeof(PlainSum));
      const auto id = [&](std::int64_t p) { return label_at(p); };
      angle_sums_by_tree(angle_x_, tags_, n_, id, classes, true, tree.as<PlainSum>(), below_, grad_ ? above_ : nullptr);
    } else if (classes == 1) {
      angle_sums_by_lanes<1>();
    } else if (classes <= 4) {
      angle_sums_by_lanes<4>();
    } else {
      angle_sums_by_lanes<max_classes>();
    }
  }

  template <int lanes>
  void angle_sums_by_lanes() {
    const Gate<lanes> gate(args_.labels != nullptr);
    const std::size_t count = chunks_.size();
    std::vector<AngleSums> totals(count), carries(count);
    if (count > 1) {
      each_chunk([&](std::size_t k, Range r) RAOE_INLINE_LAMBDA {
        angle_total(gate, angle_x_ + r.begin, angle_y_ + r.begin, tags_ + r.begin, r.end - r.begin, totals[k]);
      });
    }
    for (int lane = 0; lane < lanes; ++lane) {
      for (std::size_t k = 1; k < count; ++k) carries[k].x[lane] = carries[k - 1].x[lane] + totals[k - 1].x[lane];
      for (std::size_t k = count - 1; k-- > 0;) carries[k].y[lane] = carries[k + 1].y[lane] + totals[k + 1].y[lane];
    }
    each_chunk([&](std::size_t k, Range r) RAOE_INLINE_LAMBDA {
      angle_sweep(gate, angle_x_ + r.begin, angle_y_ + r.begin, tags_ + r.begin, r.end - r.begin, carries[k],
                  below_ + r.begin, grad_ ? above_ + r.begin : nullptr);
    });
  }

  void combine(Results& results) {
    std::vector<double> rank(chunks_.size()), angle(chunks_.size());
    each_chunk([&](std::size_t k, Range r) RAOE_INLINE_LAMBDA {
      if (args_.rank) rank[k] = rank_combine(rank_x_, rank_y_, r, before_, grad_ ? after_ : nullptr, ends_, starts_);
      if (args_.angle) angle[k] = angle_combine(angle_x_, angle_y_, r, below_, grad_ ? above_ : nullptr, c_);
    });
    double rank_z = 0, angle_z = 0;
    for (const double z : rank) rank_z += z;
    for (const double z : angle) angle_z += z;
    results.rank_loss = std::log1p(rank_z);
    results.angle_loss = std::log1p(angle_z);
    results.rank_scale = 1 / (1 + rank_z);
    results.angle_scale = 1 / (1 + angle_z);
  }

  void log_sums(Results& results) {
    if (args_.rank) {
      rank_log_sums(rank_x_, n_, before_, grad_ ? after_ : nullptr);
      if (grad_) after_[n_] = LogSum().max;
      results.rank_loss = log_combine(
          rank_x_, n_, [&](std::int64_t p) { return before_[ends_[p]]; },
          [&](std::int64_t p) { return after_[starts_[p]]; }, grad_);
      results.rank_scale = 1;
    }
    if (args_.angle) {
      const std::uint32_t classes = ids_.count();
      const Buffer tree((std::size_t{classes} + 1) * sizeof(LogSum));
      const auto id = [&](std::int64_t p) { return label_at(p); };
      angle_sums_by_tree(angle_x_, tags_, n_, id, classes, args_.labels != nullptr, tree.as<LogSum>(), below_,
                         grad_ ? above_ : nullptr);
      results.angle_loss = log_combine(
          angle_x_, n_, [&](std::int64_t p) { return below_[p]; }, [&](std::int64_t p) { return above_[p]; }, grad_);
      results.angle_scale = 1;
      for (std::int64_t p = 0; grad_ && p < n_; ++p) angle_x_[p] *= angle_slope(c_[p]);
    }
  }

  void store(const Row<C>& row, const Results& results) {
    const double rank_loss = args_.rank ? args_.rank_weight * results.rank_loss : 0;
    const double angle_loss = args_.angle ? args_.angle_weight * results.angle_loss : 0;
    if (args_.parts) {
      row.losses[0] = static_cast<C>(rank_loss);
      row.losses[row.to_angle] = static_cast<C>(angle_loss);
    } else {
      row.losses[0] = static_cast<C>(rank_loss + angle_loss);
    }
    if (!grad_) return;
    C* const grads = row.grads;
    // These factors stay in double: Z may be n^2 times the largest value of T, and 1 / Z would lose its digits in T.
    const double rank_scale = args_.tau * args_.rank_weight * results.rank_scale;
    const double angle_scale = args_.tau * args_.angle_weight * results.angle_scale;
    team_.each((n_ + chunk - 1) / chunk, [&](std::int64_t k) {
      const std::int64_t begin = k * chunk, end = std::min(n_, begin + chunk);
      if (args_.rank && args_.angle && !args_.parts) {
        for (std::int64_t p = begin; p < end; ++p) {
          grads[order_[p]] = static_cast<C>(rank_x_[p] * rank_scale + angle_x_[p] * angle_scale);
        }
        return;
      }
      C* const angle_row = grads + (args_.parts ? row.to_angle * n_ : 0);
      for (std::int64_t p = begin; p < end; ++p) {
        if (args_.rank || args_.parts) grads[order_[p]] = args_.rank ? static_cast<C>(rank_x_[p] * rank_scale) : C(0);
        if (args_.angle || args_.parts) {
          angle_row[order_[p]] = args_.angle ? static_cast<C>(angle_x_[p] * angle_scale) : C(0);
        }
      }
    });
  }

  const PairwiseArgs& args_;
  const LabelIds& ids_;
  const std::int64_t n_;
  const bool grad_;
  Team& team_;
  bool unpacked_ = false;
  Buffer memory_;
  Item<K>*items_, *sorted_;
  std::uint32_t *order_, *ends_, *starts_;
  std::uint8_t* tags_;
  C* c_;
  T *rank_x_, *rank_y_, *angle_x_, *angle_y_, *below_, *above_;
  double *before_, *after_;
  std::vector<Range> chunks_;
};

template <class C>
void fill_nan(const PairwiseArgs& args, const Row<C>& row) {
  const C nan = std::numeric_limits<C>::quiet_NaN();
  for (std::int64_t part = 0; part < (args.parts ? 2 : 1); ++part) {
    row.losses[part * row.to_angle] = nan;
    if (row.grads) std::fill_n(row.grads + part * row.to_angle * args.n, args.n, nan);
  }
}

// Return the largest difference between two exponents of the computed objectives.
template <class C>
double reach(const PairwiseArgs& args, const Extent<C>& c) {
  const double cosines = args.rank ? args.tau * (static_cast<double>(c.high) - c.low) : 0;
  if (!args.angle) return cosines;
  const double angles = angle(static_cast<double>(clip(c.low))) - angle(static_cast<double>(clip(c.high)));
  return std::max(cosines, args.tau * angles);
}

template <class C, class S, class K>
void sort_and_sum(const PairwiseArgs& args, const std::vector<Row<C>>& rows, std::uint64_t low, int key_bits,
                  Team& team) {
  const LabelIds ids(args.labels, args.n, max_classes, team);
  const S* const scores = static_cast<const S*>(args.scores);
  const auto key = [=](std::int64_t i) RAOE_INLINE_LAMBDA { return static_cast<K>(orderable(scores[i]) - low); };
  const auto run = [&](auto call) {
    const auto sort = [&](const auto& id) {
      const auto payload = [id](std::int64_t i) { return static_cast<std::uint32_t>(i) | id(i) << index_bits; };
      call.sort(key, key_bits, payload);
    };
    if (ids.count() <= max_classes) {
      ids.visit(sort);
    } else {  // more labels than fit into a payload
      sort([](std::int64_t) { return std::uint32_t{0}; });
    }
    for (const Row<C>& row : rows) call.run(row, !(reach(args, row.extent) < linear_room(false, args.n)));
  };
  if constexpr (std::is_same<C, float>::value) {
    double max_reach = 0;
    for (const Row<C>& row : rows) max_reach = std::max(max_reach, reach(args, row.extent));
    if (max_reach < linear_room(true, args.n)) return run(Call<C, float, K>(args, ids, team));
  }
  run(Call<C, double, K>(args, ids, team));
}

template <class C, class S>
void with_types(const PairwiseArgs& args, std::int64_t count, Team& team) {
  const Extent<S> scores = extent(static_cast<const S*>(args.scores), args.n, false, team);
  std::vector<Row<C>> rows;
  for (std::int64_t k = 0; k < count; ++k) {
    const C* const similarity = static_cast<const C*>(args.similarity) + k * args.n;
    C* const grads = args.grads ? static_cast<C*>(args.grads) + k * args.n : nullptr;
    const Row<C> row{similarity, static_cast<C*>(args.losses) + k, grads, count,
                     extent(similarity, args.n, true, team)};
    if (row.extent.valid && scores.valid) {
      rows.push_back(row);
    } else {
      fill_nan(args, row);
    }
  }
  if (rows.empty()) return;
  const std::uint64_t low = orderable(scores.low), range = orderable(scores.high) - low;
  const int key_bits = bit_length(range);
  if (key_bits <= 32) return sort_and_sum<C, S, std::uint32_t>(args, rows, low, key_bits, team);
  if constexpr (sizeof(S) == 8) sort_and_sum<C, S, std::uint64_t>(args, rows, low, key_bits, team);
}

template <class C>
void with_scores(const PairwiseArgs& args, std::int64_t rows, Team& team) {
  switch (args.score_type) {
    case Key::f32: return with_types<C, float>(args, rows, team);
    case Key::f64: return with_types<C, double>(args, rows, team);
    case Key::i64: return with_types<C, std::int64_t>(args, rows, team);
  }
}

}  // namespace

void pairwise_cpu(const PairwiseArgs& args, std::int64_t rows, int threads) {
  if (args.n > std::int64_t{1} << index_bits) throw std::invalid_argument("backend 'native' takes at most 2^28 pairs");
  const std::int64_t useful_threads = std::min<std::int64_t>(threads, args.n / pairs_a_thread);
  Team team(static_cast<int>(std::max<std::int64_t>(useful_threads, 1)));
  if (args.similarity_type == Float::f64) return with_scores<double>(args, rows, team);
  if (args.similarity_type == Float::f32) return with_scores<float>(args, rows, team);
  throw std::invalid_argument("similarity must be float32 or float64");
}

}  // namespace raoe
