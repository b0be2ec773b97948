// The building blocks of reduce_kernels.h: the representation of each dtype's elements while they are combined, the
// operations on two elements, and the scaling before and after. Everything works on whole vector registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/half_vector.h"
#include "collective/reduce/reduce.h"

namespace hvl {

// An element is stored as `Storage` and combined as `Value`. On<kBytes> holds as many of them as fill kParts registers
// of kBytes: widen() makes those from the loaded register, narrow() makes the register to store.
template <class T>
struct PlainElement {
  using Storage = T;
  using Value = T;

  template <size_t kBytes>
  struct On {
    static constexpr int kParts = 1;
    using Stored = Vector<T, kBytes>;
    static HVL_ALWAYS_INLINE Registers<Stored, 1> widen(Stored stored) { return {{stored}}; }
    static HVL_ALWAYS_INLINE Stored narrow(const Registers<Stored, 1>& values) { return values.parts[0]; }
  };
};

// Integers that are summed in a wider type, an unsigned one, which wraps; the result is truncated to the stored width.
template <class T, class Wide>
struct WideElement {
  static_assert(std::is_unsigned_v<Wide>);
  using Storage = T;
  using Value = Wide;

  template <size_t kBytes>
  struct On {
    static constexpr int kParts = 1;
    using Part = Vector<Wide, kBytes>;
    using Stored = Vector<T, kBytes / sizeof(Wide) * sizeof(T)>;
    static HVL_ALWAYS_INLINE Registers<Part, 1> widen(Stored stored) {
      return {{__builtin_convertvector(stored, Part)}};
    }
    static HVL_ALWAYS_INLINE Stored narrow(const Registers<Part, 1>& values) {
      return __builtin_convertvector(values.parts[0], Stored);
    }
  };
};

// Any byte but 0 is true, and true is stored as 1: sum and maximum are then `or`, product and minimum `and`.
struct BoolElement {
  using Storage = uint8_t;
  using Value = uint8_t;

  template <size_t kBytes>
  struct On {
    static constexpr int kParts = 1;
    using Stored = Vector<uint8_t, kBytes>;
    static HVL_ALWAYS_INLINE Registers<Stored, 1> widen(Stored stored) {
      return {{bit_cast<Stored>(stored != 0) & (Stored{} + 1)}};
    }
    static HVL_ALWAYS_INLINE Stored narrow(const Registers<Stored, 1>& values) { return values.parts[0]; }
  };
};

struct Float16Element {
  using Storage = uint16_t;
  using Value = float;
  template <size_t kBytes>
  using On = Float16Vector<kBytes>;
};

struct Bfloat16Element {
  using Storage = uint16_t;
  using Value = float;
  template <size_t kBytes>
  using On = Bfloat16Vector<kBytes>;
};

struct AddOp {
  template <class V>
  static HVL_ALWAYS_INLINE V apply(V a, V b) {
    return a + b;
  }
};

struct MultiplyOp {
  template <class V>
  static HVL_ALWAYS_INLINE V apply(V a, V b) {
    return a * b;
  }
};

struct OrOp {
  template <class V>
  static HVL_ALWAYS_INLINE V apply(V a, V b) {
    return a | b;
  }
};

struct AndOp {
  template <class V>
  static HVL_ALWAYS_INLINE V apply(V a, V b) {
    return a & b;
  }
};

// A NaN on either side is the result; of +0 and -0 the later one is the result.
struct MinOp {
  template <class V>
  static HVL_ALWAYS_INLINE V apply(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

struct MaxOp {
  template <class V>
  static HVL_ALWAYS_INLINE V apply(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

HVL_ALWAYS_INLINE constexpr bool is_power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }

// The scaling of elements before and after they are combined.
struct NoScale {
  explicit HVL_ALWAYS_INLINE NoScale(const Reduction&) {}
  template <class V>
  HVL_ALWAYS_INLINE V before(V value) const {
    return value;
  }
  template <class V>
  HVL_ALWAYS_INLINE V after(V value) const {
    return value;
  }
};

// Average over a power of two, whose reciprocal is exact: multiplying by it gives the bits of the division.
template <class F>
class PowerOfTwoAverage : public NoScale {
 public:
  explicit HVL_ALWAYS_INLINE PowerOfTwoAverage(const Reduction& reduction)
      : NoScale(reduction), reciprocal_(F{1} / static_cast<F>(reduction.divisor)) {}
  template <class V>
  HVL_ALWAYS_INLINE V after(V value) const {
    return value * reciprocal_;
  }

 private:
  F reciprocal_;
};

// Any scale factors. Multiplying by a factor of 1 changes no bit; all NaNs are equivalent.
template <class F>
class FloatScale {
 public:
  explicit HVL_ALWAYS_INLINE FloatScale(const Reduction& reduction)
      : prescale_(factor(reduction.prescale)), postscale_(factor(reduction.postscale)) {}
  template <class V>
  HVL_ALWAYS_INLINE V before(V value) const {
    return value * prescale_;
  }
  template <class V>
  HVL_ALWAYS_INLINE V after(V value) const {
    return value * postscale_;
  }

 private:
  static HVL_ALWAYS_INLINE F factor(double scale) {
    return scale != scale ? std::numeric_limits<F>::quiet_NaN() : static_cast<F>(scale);
  }

  F prescale_;
  F postscale_;
};

template <class F>
class FloatAverage : public FloatScale<F> {
 public:
  explicit HVL_ALWAYS_INLINE FloatAverage(const Reduction& reduction)
      : FloatScale<F>(reduction), divisor_(static_cast<F>(reduction.divisor)) {}
  template <class V>
  HVL_ALWAYS_INLINE V after(V value) const {
    return FloatScale<F>::after(value / divisor_);
  }

 private:
  F divisor_;
};

// The Average of integers, whose sum is of the unsigned type: division truncated toward zero.
template <class Signed>
class IntegerAverage : public NoScale {
 public:
  explicit HVL_ALWAYS_INLINE IntegerAverage(const Reduction& reduction)
      : NoScale(reduction),
        divisor_(reduction.divisor),
        shift_(is_power_of_two(reduction.divisor) ? __builtin_ctz(reduction.divisor) : -1) {}

  template <class V>
  HVL_ALWAYS_INLINE V after(V unsigned_sum) const {
    constexpr size_t kLanes = sizeof(V) / sizeof(Signed);
    constexpr int kSignBit = 8 * sizeof(Signed) - 1;
    auto sum = bit_cast<Vector<Signed, sizeof(V)>>(unsigned_sum);
    if (shift_ >= 0) return bit_cast<V>((sum + ((sum >> kSignBit) & (divisor_ - 1))) >> shift_);
    for (size_t lane = 0; lane < kLanes; ++lane) sum[lane] = divide(sum[lane]);
    return bit_cast<V>(sum);
  }

 private:
  // The quotient of two doubles, truncated, is the exact one for sums up to 2^52: a fractional quotient is at least 1 /
  // divisor away from the next integer, which is more than the rounding error.
  HVL_ALWAYS_INLINE Signed divide(Signed sum) const {
    constexpr int64_t kExact = int64_t{1} << 52;
    if (sum < -kExact || sum > kExact) return sum / divisor_;
    return static_cast<Signed>(static_cast<double>(sum) / static_cast<double>(divisor_));
  }

  Signed divisor_;
  int shift_;
};

}  // namespace hvl
