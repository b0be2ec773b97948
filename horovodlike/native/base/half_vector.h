// Registers of float16 or bfloat16 to registers of float32 and back. One register of 16-bit numbers becomes two
// registers of 32-bit numbers, the even ones and the odd ones; on any processor a few shifts and masks split and join
// them. Where a translation unit's level converts float16 in hardware, half a register of them is one register.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/half.h"
#include "base/target.h"

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

// bfloat16 has no use for the x86 conversion instruction (AVX512_BF16): it flushes subnormals.
template <size_t kBytes>
struct Bfloat16Vector {
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

template <size_t kBytes>
struct Float16Vector {
  static constexpr int kParts = 2;
  using Float = Vector<float, kBytes>;
  using Bits = Vector<uint32_t, kBytes>;
  using Stored = Vector<uint16_t, kBytes>;

  static HVL_ALWAYS_INLINE Registers<Float, kParts> widen(Stored stored) {
    const Bits both = bit_cast<Bits>(stored);
    const Bits even = widen_float16<Float>(both & 0xffffu);
    const Bits odd = widen_float16<Float>(both >> 16);
    return {{bit_cast<Float>(even), bit_cast<Float>(odd)}};
  }
  static HVL_ALWAYS_INLINE Stored narrow(const Registers<Float, kParts>& values) {
    const Bits even = narrow_float16<Float>(bit_cast<Bits>(values.parts[0]));
    const Bits odd = narrow_float16<Float>(bit_cast<Bits>(values.parts[1]));
    return bit_cast<Stored>(even | odd << 16);
  }
};

#if HVL_X86_DISPATCH
template <>
struct Float16Vector<32> {
  static constexpr int kParts = 1;
  using Float = Vector<float, 32>;
  using Stored = Vector<uint16_t, 16>;

  __attribute__((target("avx2,f16c"))) static HVL_ALWAYS_INLINE Registers<Float, 1> widen(Stored stored) {
    return {{_mm256_cvtph_ps(bit_cast<__m128i>(stored))}};
  }
  __attribute__((target("avx2,f16c"))) static HVL_ALWAYS_INLINE Stored narrow(const Registers<Float, 1>& values) {
    return bit_cast<Stored>(_mm256_cvtps_ph(values.parts[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
};

template <>
struct Float16Vector<64> {
  static constexpr int kParts = 1;
  static constexpr uint16_t kAllLanes = 0xffff;  // without a mask, GCC 12 warns of its own header
  using Float = Vector<float, 64>;
  using Stored = Vector<uint16_t, 32>;

  __attribute__((target("avx512f"))) static HVL_ALWAYS_INLINE Registers<Float, 1> widen(Stored stored) {
    return {{_mm512_maskz_cvtph_ps(kAllLanes, bit_cast<__m256i>(stored))}};
  }
  __attribute__((target("avx512f"))) static HVL_ALWAYS_INLINE Stored narrow(const Registers<Float, 1>& values) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return bit_cast<Stored>(_mm512_maskz_cvtps_ph(kAllLanes, values.parts[0], kNearest));
  }
};
#endif

}  // namespace hvl
