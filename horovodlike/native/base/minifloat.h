// Conversion of minifloats (floating-point numbers of less than 32 bits) to float32 and back: rounding to nearest even,
// subnormals exact, NaN stays NaN.
//
// The code has no branches, so that the same templates serve a single value and a vector of values: `Bits` is uint32_t
// or a vector of it, `Float` the float or vector of floats of the same size. The method (let the floating-point adder
// do the rounding of subnormals) is Fabian Giesen's, https://gist.github.com/rygorous/2156668.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/target.h"
#include "base/types.h"

namespace hvl {

template <class To, class From>
HVL_ALWAYS_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// The format of a minifloat T, and the constants of its conversion: bits at their positions in a float32.
template <class T>
struct MinifloatFormat {
  static constexpr int kShift = 23 - T::kFractionBits;
  static constexpr int kToSign = 32 - 8 * static_cast<int>(sizeof(T));  // shift from its sign bit to float32's
  static constexpr uint32_t kSign = 0x80000000u >> kToSign;
  static constexpr uint32_t kTopExponent = (1u << T::kExponentBits) - 1;  // infinity's and NaN's
  static constexpr uint32_t kBias = kTopExponent >> 1;
  static constexpr uint32_t kRebias = (127u - kBias) << 23;  // from its exponent's bias to float32's
  static constexpr uint32_t kSmallestNormal = (128u - kBias) << 23;
};

// Converts the bits of a T, the low bits of `number`, to the bits of the same number as a float32.
template <class T, class Float, class Bits>
HVL_ALWAYS_INLINE Bits widen_bits(Bits number) {
  using Format = MinifloatFormat<T>;
  constexpr uint32_t kExponent = Format::kTopExponent << 23;
  constexpr uint32_t kSpecial = T::kHasInfinity ? kExponent : (Format::kSign - 1) << Format::kShift;
  if constexpr (T::kExponentBits == 8) return number << Format::kShift;  // the upper bits of a float32
  const Bits magnitude = (number & (Format::kSign - 1)) << Format::kShift;
  const Bits exponent = magnitude & kExponent;
  const Bits normal = magnitude + Format::kRebias;
  const Bits special = magnitude + ((255u - Format::kTopExponent) << 23);  // infinity and NaN
  // The exponent of a subnormal is one too low. Correcting it adds an implicit leading one, which is subtracted again.
  const Float with_one = bit_cast<Float>(magnitude + Format::kSmallestNormal);
  const Bits subnormal = bit_cast<Bits>(with_one - bit_cast<Float>(Bits{} + Format::kSmallestNormal));
  const Bits finite = exponent == 0u ? subnormal : normal;
  return ((magnitude & kSpecial) == kSpecial ? special : finite) | (number & Format::kSign) << Format::kToSign;
}

// Converts the bits of a float32 to the bits of the nearest T.
template <class T, class Float, class Bits>
HVL_ALWAYS_INLINE Bits narrow_bits(Bits bits) {
  using Format = MinifloatFormat<T>;
  constexpr int kShift = Format::kShift;
  constexpr uint32_t kHalf = 1u << (kShift - 1);  // half of the last place
  constexpr uint32_t kQuiet = 1u << (T::kFractionBits - 1);
  constexpr uint32_t kFraction = 2 * kQuiet - 1;
  constexpr uint32_t kInfinity = 255u << 23;
  if constexpr (T::kExponentBits == 8) {
    const Bits rounded = (bits + (kHalf - 1) + ((bits >> kShift) & 1u)) >> kShift;
    const Bits nan = bits >> kShift | kQuiet;
    return (bits & 0x7fffffffu) > kInfinity ? nan : rounded;
  }
  constexpr uint32_t kNan = Format::kSign - 1;
  constexpr uint32_t kMost = T::kHasInfinity ? Format::kTopExponent << T::kFractionBits : kNan - 1;  // max magnitude
  constexpr uint32_t kOverflow = (kMost << kShift) + Format::kRebias;      // the least value whose result is kMost
  constexpr uint32_t kRounder = Format::kSmallestNormal + (kShift << 23);  // its last place equals a subnormal T's
  const Bits magnitude = bits & 0x7fffffffu;
  const Float rounder = bit_cast<Float>(Bits{} + kRounder);
  const Bits subnormal = bit_cast<Bits>(bit_cast<Float>(magnitude) + rounder) - kRounder;
  const Bits odd = (magnitude >> kShift) & 1u;
  const Bits normal = (magnitude - Format::kRebias + (kHalf - 1) + odd) >> kShift;
  const Bits nan = sizeof(T) == 1 ? Bits{} + kNan : kMost | kQuiet | ((magnitude >> kShift) & kFraction);
  const Bits finite = magnitude < Format::kSmallestNormal ? subnormal : normal;
  const Bits special = magnitude > kInfinity ? nan : Bits{} + kMost;
  return (magnitude < kOverflow ? finite : special) | (bits & 0x80000000u) >> Format::kToSign;
}

// Converts a number to the type in which the engine computes: float for a minifloat, else its own type.
template <class T>
HVL_ALWAYS_INLINE auto widen(T number) {
  if constexpr (kIsMinifloat<T>) {
    return bit_cast<float>(widen_bits<T, float>(uint32_t{number.bits}));
  } else {
    return number;
  }
}

// Converts a number back from that type, or from a type with more bits.
template <class T, class Value>
HVL_ALWAYS_INLINE T narrow(Value value) {
  if constexpr (kIsMinifloat<T>) {
    const uint32_t bits = narrow_bits<T, float>(bit_cast<uint32_t>(static_cast<float>(value)));
    return T{static_cast<typename T::Bits>(bits)};
  } else {
    return static_cast<T>(value);
  }
}

}  // namespace hvl
