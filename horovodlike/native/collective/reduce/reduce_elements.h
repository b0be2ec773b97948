// The building blocks of reduce_kernels.h: vectors, the representation of each dtype's elements while they are
// combined, the operations on two elements, and the scaling before and after. Everything works on whole vector
// registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/minifloat.h"
#include "base/target.h"
#include "collective/reduce/reduce.h"

namespace hvl {

template <class T, size_t kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T, size_t kBytes>
using Vector = typename VectorOf<T, kBytes>::type;

template <class Part, int kParts>
struct Registers {
  Part parts[kParts];
};

// Converts a register of minifloats to two or four registers of float32, and back. It is read as words of 32 bits: the
// first float32 register has the lowest number of each word. Shifts and masks, which any processor has, split and join
// the words. Specializations convert float16 in hardware; with AVX2 and AVX-512, half a register becomes one register.
template <class T, size_t kBytes>
struct MinifloatVector {
  static constexpr int kParts = sizeof(float) / sizeof(T);
  using Float = Vector<float, kBytes>;
  using Bits = Vector<uint32_t, kBytes>;
  using Stored = Vector<typename T::Bits, kBytes>;

  static HVL_ALWAYS_INLINE Registers<Float, kParts> widen(Stored stored) {
    const Bits words = bit_cast<Bits>(stored);
    Registers<Float, kParts> values;
    HVL_UNROLL
    for (int part = 0; part < kParts; ++part) {
      values.parts[part] = bit_cast<Float>(widen_bits<T, Float>(words >> part * kWidth));
    }
    return values;
  }
  static HVL_ALWAYS_INLINE Stored narrow(const Registers<Float, kParts>& values) {
    Bits words{};
    HVL_UNROLL
    for (int part = 0; part < kParts; ++part) {
      words |= narrow_bits<T, Float>(bit_cast<Bits>(values.parts[part])) << part * kWidth;
    }
    return bit_cast<Stored>(words);
  }

 private:
  static constexpr int kWidth = 8 * sizeof(T);
};

// Does not use the conversion instructions for bfloat16: AVX512_BF16 flushes subnormals, few processors have BFCVT.
template <size_t kBytes>
struct MinifloatVector<Bfloat16, kBytes> {
  static constexpr int kParts = 2;
  using Float = Vector<float, kBytes>;
  using Bits = Vector<uint32_t, kBytes>;
  using Stored = Vector<uint16_t, kBytes>;

  static HVL_ALWAYS_INLINE Registers<Float, kParts> widen(Stored stored) {
    const Bits both = bit_cast<Bits>(stored);
    return {{bit_cast<Float>(both << 16), bit_cast<Float>(both & 0xffff0000u)}};
  }
  // NaN needs no separate case: operations on NaNs keep the bits of one operand or produce the processor's default NaN,
  // so the 16 bits that are cut off are zero, and rounding carries nothing.
  static HVL_ALWAYS_INLINE Stored narrow(const Registers<Float, kParts>& values) {
    const Bits even = rounded(bit_cast<Bits>(values.parts[0])) >> 16;
    const Bits odd = rounded(bit_cast<Bits>(values.parts[1])) & 0xffff0000u;
    return bit_cast<Stored>(even | odd);
  }

 private:
  static HVL_ALWAYS_INLINE Bits rounded(Bits bits) { return bits + 0x7fffu + ((bits >> 16) & 1u); }
};

#if HVL_X86_DISPATCH
template <>
struct MinifloatVector<Float16, 32> {
  static constexpr int kParts = 1;
  using Float = Vector<float, 32>;
  using Stored = Vector<uint16_t, 16>;

  __attribute__((target(HVL_AVX2))) static HVL_ALWAYS_INLINE Registers<Float, 1> widen(Stored stored) {
    return {{_mm256_cvtph_ps(bit_cast<__m128i>(stored))}};
  }
  __attribute__((target(HVL_AVX2))) static HVL_ALWAYS_INLINE Stored narrow(const Registers<Float, 1>& values) {
    return bit_cast<Stored>(_mm256_cvtps_ph(values.parts[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

template <>
struct MinifloatVector<Float16, 64> {
  static constexpr int kParts = 1;
  static constexpr uint16_t kAllLanes = 0xffff;  // without a mask, GCC 12 warns about its own header
  using Float = Vector<float, 64>;
  using Stored = Vector<uint16_t, 32>;

  __attribute__((target(HVL_AVX512))) static HVL_ALWAYS_INLINE Registers<Float, 1> widen(Stored stored) {
    return {{_mm512_maskz_cvtph_ps(kAllLanes, bit_cast<__m256i>(stored))}};
  }
  __attribute__((target(HVL_AVX512))) static HVL_ALWAYS_INLINE Stored narrow(const Registers<Float, 1>& values) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return bit_cast<Stored>(_mm512_maskz_cvtps_ph(kAllLanes, values.parts[0], kNearest));
  }
};
#endif

#if HVL_NEON
template <>
struct MinifloatVector<Float16, 16> {
  static constexpr int kParts = 2;
  using Float = Vector<float, 16>;
  using Stored = Vector<uint16_t, 16>;

  static HVL_ALWAYS_INLINE Registers<Float, 2> widen(Stored stored) {
    const auto numbers = bit_cast<float16x8_t>(stored);
    return {{bit_cast<Float>(vcvt_f32_f16(vget_low_f16(numbers))), bit_cast<Float>(vcvt_high_f32_f16(numbers))}};
  }
  static HVL_ALWAYS_INLINE Stored narrow(const Registers<Float, 2>& values) {
    const auto low = vcvt_f16_f32(bit_cast<float32x4_t>(values.parts[0]));
    return bit_cast<Stored>(vcvt_high_f16_f32(low, bit_cast<float32x4_t>(values.parts[1])));
  }
};

template <>
struct MinifloatVector<Bfloat16, 16> {
  static constexpr int kParts = 2;
  using Float = Vector<float, 16>;
  using Stored = Vector<uint16_t, 16>;

  static HVL_ALWAYS_INLINE Registers<Float, 2> widen(Stored stored) {
    const auto numbers = bit_cast<uint16x8_t>(stored);
    return {{bit_cast<Float>(vmovl_u16(vget_low_u16(numbers)) << 16), bit_cast<Float>(vmovl_high_u16(numbers) << 16)}};
  }
  static HVL_ALWAYS_INLINE Stored narrow(const Registers<Float, 2>& values) {
    const auto low = vaddhn_u32(with_odd(values.parts[0]), vdupq_n_u32(0x7fff));
    return bit_cast<Stored>(vaddhn_high_u32(low, with_odd(values.parts[1]), vdupq_n_u32(0x7fff)));
  }

 private:
  // Adds one if the last bit of the upper half, which becomes the result, is set (to round to even).
  static HVL_ALWAYS_INLINE uint32x4_t with_odd(Float value) {
    const auto bits = bit_cast<uint32x4_t>(value);
    return vaddq_u32(bits, vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1)));
  }
};
#endif

// An element is stored as `Storage` and combined as `Value`. In On<kBytes>, widen() converts the loaded register to
// kParts registers of kBytes, and narrow() converts them back to the register to store.
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

// Integers that are summed in a wider unsigned type, whose overflow wraps; the result is truncated to the stored width.
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

template <class T>
struct MinifloatElement {
  using Storage = T;
  using Value = float;
  template <size_t kBytes>
  using On = MinifloatVector<T, kBytes>;
};

#define HVL_ELEMENT_OP(name, result)             \
  struct name {                                  \
    template <class V>                           \
    static HVL_ALWAYS_INLINE V apply(V a, V b) { \
      return result;                             \
    }                                            \
  };
HVL_ELEMENT_OP(AddOp, (a + b))
HVL_ELEMENT_OP(MultiplyOp, (a * b))
HVL_ELEMENT_OP(OrOp, (a | b))
HVL_ELEMENT_OP(AndOp, (a & b))
// A NaN on either side is the result; of +0 and -0 the later one is the result.
HVL_ELEMENT_OP(MinOp, ((a < b) | (a != a)) ? a : b)
HVL_ELEMENT_OP(MaxOp, ((a > b) | (a != a)) ? a : b)
#undef HVL_ELEMENT_OP

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

// An Average whose divisor is a power of two: multiplying by its exact reciprocal gives the bits of the division.
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

// The Average of integers: reads the unsigned sum as signed, and divides it, truncating toward zero.
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
