// Calls csrc's CPU functions with any values that their headers allow: driver SEED CASES MOST [hostile]
//
// Arrays are as large as the headers say and no larger. Each case runs by one thread and by up to 8, whose results have to
// be the same bits, all of them written. MOST: of elements in an array. hostile: another thread rewrites the values
// meanwhile, and only that no place out of bounds is touched can then be asked.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cosine/cosine.h"
#include "pairwise/pairwise.h"

extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*)());

namespace {

std::int64_t seed, current;
void say_case() { std::fprintf(stderr, "driver: seed %ld, case %ld\n", static_cast<long>(seed), static_cast<long>(current)); }

struct Random {
  std::mt19937_64 engine;
  std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(n)); }
  bool once_in(int n) { return below(n) == 0; }
  double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(engine); }
  // 1 to most, small ones as often as large ones.
  std::int64_t size(std::int64_t most) { return static_cast<std::int64_t>(std::exp2(uniform(0, std::log2(most + 0.999)))); }

  template <class T>
  T special() {
    using Limits = std::numeric_limits<T>;
    const T all[] = {Limits::quiet_NaN(), Limits::infinity(), -Limits::infinity(), Limits::denorm_min(), -Limits::denorm_min(),
                     Limits::min(), Limits::max(), Limits::lowest(), T(-0.0), T(0), T(1), T(-1)};
    return all[below(12)];
  }
  std::int64_t integer() {
    const std::int64_t all[] = {INT64_MIN, INT64_MAX, INT64_MIN + 1, -1, 0, 1, static_cast<std::int64_t>(engine())};
    return all[below(7)];
  }
};

// What an array is filled with is of one kind.
template <class T>
std::function<T()> source(Random& random) {
  if constexpr (std::is_integral_v<T>) {
    const std::int64_t few = 1 + random.below(40), most = 1 + random.below(1 << 20), base = random.integer();
    std::vector<std::int64_t> known(static_cast<std::size_t>(few));
    for (std::int64_t& each : known) each = random.integer();
    switch (random.below(4)) {
      case 0: return [&random, few] { return static_cast<T>(random.below(few)); };
      case 1: return [&random, most, base] { return static_cast<T>(static_cast<std::uint64_t>(base) + random.below(most)); };
      case 2: return [&random, known] { return static_cast<T>(known[static_cast<std::size_t>(random.below(known.size()))]); };
      default: return [&random] { return static_cast<T>(random.engine()); };
    }
  } else {
    const double scale = random.once_in(3) ? std::exp2(random.uniform(-140, 120)) : 1, steps = 1 + random.below(30);
    const int rare = 1 << random.below(12);
    switch (random.below(6)) {
      case 0: return [&random, scale] { return static_cast<T>(random.uniform(-scale, scale)); };
      case 1: return [&random, steps] { return static_cast<T>(std::floor(random.uniform(-steps, steps)) / steps); };
      case 2: return [&random, rare] { return random.once_in(rare) ? random.special<T>() : static_cast<T>(random.uniform(-1, 1)); };
      case 3: return [&random] {  // any bits
        T value;
        const std::uint64_t bits = random.engine();
        std::memcpy(&value, &bits, sizeof(T));
        return value;
      };
      case 4: return [value = random.special<T>()] { return value; };
      default: return [&random] { return static_cast<T>(random.uniform(-1, 1)); };
    }
  }
}

// A block of its own, so that what lies before and behind it is seen.
struct Array {
  std::unique_ptr<char[]> data;
  std::size_t bytes = 0;
  template <class T>
  static Array of(Random& random, std::int64_t count) {
    Array made{std::unique_ptr<char[]>(new char[static_cast<std::size_t>(count) * sizeof(T)]), count * sizeof(T)};
    const std::function<T()> next = source<T>(random);
    for (std::int64_t i = 0; i < count; ++i) {
      const T value = next();
      std::memcpy(made.data.get() + i * sizeof(T), &value, sizeof(T));
    }
    return made;
  }
  static Array filled(std::size_t bytes, int with) {
    Array made{std::unique_ptr<char[]>(new char[bytes]), bytes};
    std::memset(made.data.get(), with, bytes);
    return made;
  }
  Array copy() const {
    Array made{std::unique_ptr<char[]>(new char[bytes]), bytes};
    std::memcpy(made.data.get(), data.get(), bytes);
    return made;
  }
  void* get() const { return data.get(); }
};

// Swaps places of the arrays until it goes out of scope.
class Hostile {
 public:
  Hostile(bool wanted, std::vector<const Array*> arrays, std::uint64_t start) {
    if (!wanted) return;
    thread_ = std::thread([this, arrays, start] {
      Random random{std::mt19937_64(start)};
      while (!done_.load()) {
        for (const Array* each : arrays) {
          const std::int64_t words = static_cast<std::int64_t>(each->bytes / 8);
          if (words == 0) continue;
          const std::uint64_t value = random.once_in(2) ? random.engine() : static_cast<std::uint64_t>(random.integer());
          std::memcpy(each->data.get() + 8 * random.below(words), &value, 8);
        }
      }
    });
  }
  ~Hostile() {
    done_.store(true);
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::atomic<bool> done_{false};
  std::thread thread_;
};

// Calls with results of so many bytes each, by 1 thread and by some.
void compare(Random& random, bool hostile, std::vector<const Array*> given, const std::vector<std::size_t>& bytes,
             const std::function<void(const std::vector<Array>&, int)>& call) {
  std::vector<Array> first, second;
  for (const std::size_t each : bytes) {
    first.push_back(Array::filled(each, 0xA5));
    second.push_back(Array::filled(each, 0x5A));
  }
  const int threads = static_cast<int>(1 + random.below(6));
  {
    const Hostile other(hostile, given, random.engine());
    call(first, 1);
    call(second, threads);
  }
  for (std::size_t k = 0; k < bytes.size() && !hostile; ++k) {
    if (std::memcmp(first[k].get(), second[k].get(), bytes[k]) == 0) continue;
    std::fprintf(stderr, "result %zu is not the same by %d threads\n", k, threads);
    say_case();
    std::exit(1);
  }
}

template <class C>
Array scores_of(Random& random, raoe::Key key, std::int64_t n) {
  if (key == raoe::Key::f32) return Array::of<float>(random, n);
  if (key == raoe::Key::f64) return Array::of<double>(random, n);
  return Array::of<std::int64_t>(random, n);
}

template <class C>
void pairwise(Random& random, std::int64_t most, bool hostile) {
  const std::int64_t n = random.size(most), rows = random.once_in(4) ? 1 + random.below(4) : 1;
  const auto key = static_cast<raoe::Key>(random.below(3));
  const Array similarity = Array::of<C>(random, n * rows), scores = scores_of<C>(random, key, n);
  const Array labels = Array::of<std::int64_t>(random, n);
  const bool rank = random.below(3) < 2, angle = !rank || random.once_in(2), parts = random.once_in(2), grad = random.below(4) > 0;
  const std::size_t results = static_cast<std::size_t>(rows * (parts ? 2 : 1)) * sizeof(C);
  raoe::PairwiseArgs args{};
  args.similarity = similarity.get(), args.scores = scores.get(), args.n = n;
  args.labels = random.once_in(3) ? nullptr : static_cast<const std::int64_t*>(labels.get());
  args.similarity_type = sizeof(C) == 8 ? raoe::Float::f64 : raoe::Float::f32, args.score_type = key;
  args.ties = static_cast<raoe::Ties>(random.below(5));
  args.rank = rank, args.angle = angle, args.parts = parts;
  args.tau = random.once_in(3) ? std::exp2(random.uniform(-1000, 1000)) : random.uniform(0.1, 50);
  args.threshold = random.once_in(4) ? std::int64_t{1} << random.below(63) : 1 + random.below(6);
  args.rank_weight = random.uniform(-2, 2), args.angle_weight = random.once_in(5) ? 0 : 1;
  compare(random, hostile, {&similarity, &scores, &labels}, {results, grad ? results * static_cast<std::size_t>(n) : 0},
          [&](const std::vector<Array>& out, int threads) {
            args.losses = out[0].get(), args.grads = grad ? out[1].get() : nullptr;
            raoe::pairwise_cpu(args, rows, threads);
          });
  const Array upstream = Array::of<C>(random, rows), other = Array::of<C>(random, rows);
  const Array grads = Array::of<C>(random, n * rows * 2);
  compare(random, hostile, {&grads}, {static_cast<std::size_t>(n * rows) * sizeof(C)}, [&](const std::vector<Array>& out, int) {
    raoe::scale_cpu(grads.get(), n, args.similarity_type, parts ? 2 : 1, rows, upstream.get(), other.get(), out[0].get());
  });
}

template <class T>
void cosine(Random& random, std::int64_t most, bool hostile) {
  const std::int64_t columns = random.size(std::min<std::int64_t>(most, 2048)), rows = random.size(std::max<std::int64_t>(1, most / columns));
  const std::int64_t stride_a = columns + random.below(3), stride_b = columns + random.below(3);
  const Array a = Array::of<T>(random, (rows - 1) * stride_a + columns), b = Array::of<T>(random, (rows - 1) * stride_b + columns);
  std::vector<std::int64_t> dims;
  for (std::int64_t width = 0; dims.size() < 5;) {
    width += random.size(columns);
    if (width > columns) break;
    dims.push_back(width);
  }
  if (dims.empty()) dims = {columns};
  const auto type = sizeof(T) == 8 ? raoe::Float::f64 : raoe::Float::f32;
  const std::int64_t count = static_cast<std::int64_t>(dims.size()) * rows;
  const std::size_t one = static_cast<std::size_t>(count) * sizeof(T), whole = static_cast<std::size_t>(rows * columns) * sizeof(T);
  const double eps = random.once_in(3) ? std::exp2(random.uniform(-400, 20)) : 1e-8;
  compare(random, hostile, {&a, &b}, {one, one, one}, [&](const std::vector<Array>& out, int threads) {
    raoe::cosine_cpu({a.get(), b.get(), rows, columns, stride_a, stride_b, type, eps, out[0].get(), out[1].get(), out[2].get()},
                     dims, threads);
  });
  const Array grad = Array::of<T>(random, count), c = Array::of<T>(random, count);
  const Array inverse_a = Array::of<T>(random, count), inverse_b = Array::of<T>(random, count);
  const bool by_a = random.below(4) > 0, by_b = !by_a || random.below(4) > 0;
  compare(random, hostile, {&a, &b, &grad}, {by_a ? whole : 0, by_b ? whole : 0}, [&](const std::vector<Array>& out, int threads) {
    raoe::cosine_grad_cpu({grad.get(), a.get(), b.get(), rows, columns, stride_a, stride_b, type, c.get(), inverse_a.get(),
                           inverse_b.get(), by_a ? out[0].get() : nullptr, by_b ? out[1].get() : nullptr},
                          dims, threads);
  });
}

}  // namespace

int main(int count, char** words) {
  if (count < 4) return 2;
  seed = std::atoll(words[1]);
  const std::int64_t cases = std::atoll(words[2]), most = std::atoll(words[3]);
  const bool hostile = count > 4;
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(say_case);
  for (current = 0; current < cases; ++current) {
    std::seed_seq both{seed, current};
    Random random{std::mt19937_64(both)};
    switch (random.below(6)) {
      case 0: cosine<float>(random, most, hostile); break;
      case 1: cosine<double>(random, most, hostile); break;
      case 2: pairwise<double>(random, most, hostile); break;
      default: pairwise<float>(random, most, hostile);
    }
  }
  std::printf("%ld cases\n", static_cast<long>(cases));
}
