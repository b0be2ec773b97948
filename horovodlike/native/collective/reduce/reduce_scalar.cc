// The definition of every reduction, one element at a time and without optimization. It shares nothing with the vector
// kernels but minifloat.h, so that tests can compare the two.
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/minifloat.h"
#include "collective/reduce/reduce.h"

namespace hvl {
namespace {

template <class T>
T load(const void* array, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(array) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void store(void* array, size_t i, T value) {
  std::memcpy(static_cast<char*>(array) + i * sizeof(T), &value, sizeof(T));
}

template <class T>
T min_of(T a, T b) {
  return a < b || a != a ? a : b;
}

template <class T>
T max_of(T a, T b) {
  return a > b || a != a ? a : b;
}

// Truncates toward zero; a value that does not fit becomes the nearest one that does, NaN becomes 0.
template <class T>
T truncate(double value) {
  using Limits = std::numeric_limits<T>;
  if (value != value) return 0;
  if (value <= static_cast<double>(Limits::min())) return Limits::min();
  if (value >= static_cast<double>(Limits::max())) return Limits::max();
  return static_cast<T>(value);
}

template <class F>
F combine_floats(ReduceOp op, F a, F b) {
  switch (op) {
    case HVL_MIN: return min_of(a, b);
    case HVL_MAX: return max_of(a, b);
    case HVL_PRODUCT: return a * b;
    default: return a + b;
  }
}

// `F` is the type of the arithmetic.
template <class T, class F = decltype(widen(T()))>
void reduce_floats(const Reduction& reduction, const void* const* sources, int num_sources, void* dst, size_t count) {
  const F prescale = static_cast<F>(reduction.prescale);
  for (size_t i = 0; i < count; ++i) {
    F result = widen(load<T>(sources[0], i)) * prescale;
    for (int source = 1; source < num_sources; ++source) {
      const F value = widen(load<T>(sources[source], i)) * prescale;
      result = combine_floats(reduction.op, result, value);
    }
    if (reduction.op == HVL_AVERAGE) result = result / static_cast<F>(reduction.divisor);
    store(dst, i, narrow<T>(result * static_cast<F>(reduction.postscale)));
  }
}

// Sum and Product use the unsigned type, in which overflow wraps.
template <class Wide>
Wide combine_integers(ReduceOp op, Wide a, Wide b) {
  using Unsigned = std::make_unsigned_t<Wide>;
  switch (op) {
    case HVL_MIN: return min_of(a, b);
    case HVL_MAX: return max_of(a, b);
    case HVL_PRODUCT: return static_cast<Wide>(static_cast<Unsigned>(a) * static_cast<Unsigned>(b));
    default: return static_cast<Wide>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b));
  }
}

template <class T>
void reduce_integers(const Reduction& reduction, const void* const* sources, int num_sources, void* dst, size_t count) {
  using Wide = std::conditional_t<sizeof(T) <= 2, int32_t, int64_t>;
  const auto scaled = [&](size_t source, size_t i) {
    const Wide value = load<T>(sources[source], i);
    return reduction.prescale == 1.0 ? value : truncate<Wide>(static_cast<double>(value) * reduction.prescale);
  };
  for (size_t i = 0; i < count; ++i) {
    Wide result = scaled(0, i);
    for (int source = 1; source < num_sources; ++source) {
      result = combine_integers(reduction.op, result, scaled(source, i));
    }
    if (reduction.op == HVL_AVERAGE) result /= reduction.divisor;
    if (reduction.postscale == 1.0) {
      store(dst, i, static_cast<T>(result));
    } else {
      store(dst, i, truncate<T>(static_cast<double>(result) * reduction.postscale));
    }
  }
}

// Ignores the scale factors, which have no meaning for bools.
void reduce_bools(const Reduction& reduction, const void* const* sources, int num_sources, void* dst, size_t count) {
  const bool all = reduction.op == HVL_MIN || reduction.op == HVL_PRODUCT;
  for (size_t i = 0; i < count; ++i) {
    bool result = all;
    for (int source = 0; source < num_sources; ++source) {
      const bool value = load<uint8_t>(sources[source], i) != 0;
      result = all ? result && value : result || value;
    }
    store<uint8_t>(dst, i, result ? 1 : 0);
  }
}

}  // namespace

void reduce_scalar(const Reduction& reduction, const void* const* sources, int num_sources, void* dst, size_t count) {
  with_type(reduction.dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, bool>) {
      reduce_bools(reduction, sources, num_sources, dst, count);
    } else if constexpr (kIsFloating<T>) {
      reduce_floats<T>(reduction, sources, num_sources, dst, count);
    } else {
      reduce_integers<T>(reduction, sources, num_sources, dst, count);
    }
  });
}

}  // namespace hvl
