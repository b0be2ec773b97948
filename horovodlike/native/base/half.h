// float16 and bfloat16 to float32 and back: rounding to nearest even, subnormals exact, NaN stays NaN.
//
// The code has no branches, so that the same templates serve a single value and a vector of values: `Bits` is uint32_t
// or a vector of it, `Float` the float or vector of floats of the same size. The method (let the floating-point adder
// do the rounding of subnormals) is Fabian Giesen's, https://gist.github.com/rygorous/2156668.
#pragma once

#include <cstdint>

#include "base/target.h"

namespace hvl {

template <class To, class From>
HVL_ALWAYS_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// The bits of a float16 (the low 16 of `half`) to the bits of the same number as a float32.
template <class Float, class Bits>
HVL_ALWAYS_INLINE Bits widen_float16(Bits half) {
  constexpr uint32_t kExponent = 0x7c00u << 13;
  constexpr uint32_t kSmallestNormal = 113u << 23;  // 2^-14
  const Bits magnitude = (half & 0x7fffu) << 13;
  const Bits exponent = magnitude & kExponent;
  const Bits normal = magnitude + ((127u - 15u) << 23);
  const Bits special = magnitude + ((255u - 31u) << 23);  // infinity and NaN
  // The exponent of a subnormal is one too low. Correcting it adds an implicit leading one, which is subtracted again.
  const Float with_one = bit_cast<Float>(magnitude + kSmallestNormal);
  const Bits subnormal = bit_cast<Bits>(with_one - bit_cast<Float>(Bits{} + kSmallestNormal));
  const Bits finite = exponent == 0u ? subnormal : normal;
  return (exponent == kExponent ? special : finite) | (half & 0x8000u) << 16;
}

// The bits of a float32 to those of the nearest float16.
template <class Float, class Bits>
HVL_ALWAYS_INLINE Bits narrow_float16(Bits bits) {
  constexpr uint32_t kInfinity = 255u << 23;
  constexpr uint32_t kOverflow = (127u + 16u) << 23;                  // 2^16: this and anything larger becomes infinity
  constexpr uint32_t kSmallestNormal = 113u << 23;                    // 2^-14
  constexpr uint32_t kRounder = (127u - 15u + 23u - 10u + 1u) << 23;  // its last place is that of a subnormal float16
  const Bits magnitude = bits & 0x7fffffffu;
  const Float rounder = bit_cast<Float>(Bits{} + kRounder);
  const Bits subnormal = bit_cast<Bits>(bit_cast<Float>(magnitude) + rounder) - kRounder;
  const Bits odd = (magnitude >> 13) & 1u;
  const Bits normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  const Bits nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const Bits finite = magnitude < kSmallestNormal ? subnormal : normal;
  const Bits special = magnitude > kInfinity ? nan : Bits{} + 0x7c00u;
  return (magnitude < kOverflow ? finite : special) | (bits & 0x80000000u) >> 16;
}

// The bits of a float32 to those of the nearest bfloat16.
template <class Bits>
HVL_ALWAYS_INLINE Bits narrow_bfloat16(Bits bits) {
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Bits nan = bits >> 16 | 0x40u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

inline float float16_to_float(uint16_t half) { return bit_cast<float>(widen_float16<float>(uint32_t{half})); }

inline uint16_t float_to_float16(float value) {
  return static_cast<uint16_t>(narrow_float16<float>(bit_cast<uint32_t>(value)));
}

inline float bfloat16_to_float(uint16_t half) { return bit_cast<float>(uint32_t{half} << 16); }

inline uint16_t float_to_bfloat16(float value) {
  return static_cast<uint16_t>(narrow_bfloat16(bit_cast<uint32_t>(value)));
}

}  // namespace hvl
