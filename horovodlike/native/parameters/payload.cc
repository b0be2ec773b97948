#include "parameters/payload.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/minifloat.h"

namespace hvl {

namespace {

constexpr float kMostInt8 = 127;

uint64_t scales_of(uint64_t count) { return (count + kScaledElements - 1) / kScaledElements; }

// A conversion of up to kScaledElements elements: to_narrow() of a number, and to_wide() back.
struct AsBfloat16 {
  using Narrow = Bfloat16;
  Narrow to_narrow(float number) const { return hvl::narrow<Bfloat16>(number); }
  float to_wide(Narrow number) const { return hvl::widen(number); }
};

struct AsInt8 {
  using Narrow = int8_t;
  float scale, inverse;

  explicit AsInt8(float of) : scale(of), inverse(of >= std::numeric_limits<float>::min() ? 1 / of : 0) {}
  // Rounds to the nearest; ties away from zero.
  Narrow to_narrow(float number) const {
    const float scaled = number * inverse;
    return static_cast<int8_t>(static_cast<int32_t>(scaled + (scaled < 0 ? -0.5F : 0.5F)));
  }
  float to_wide(Narrow number) const { return scale * static_cast<float>(number); }
};

// NaN if an element is not finite, or too large.
template <class T>
float scale_of(const T* elements, uint64_t count, const T* residual) {
  constexpr uint32_t kInfinity = 255U << 23;
  uint32_t most = 0;  // the bits of magnitudes are in the order of these, and NaN's are above all others
  for (uint64_t i = 0; i < count; ++i) {
    const auto wanted = static_cast<float>(residual != nullptr ? elements[i] + residual[i] : elements[i]);
    most = std::max(most, bit_cast<uint32_t>(wanted) & 0x7fffffffU);
  }
  return most < kInfinity ? bit_cast<float>(most) / kMostInt8 : std::numeric_limits<float>::quiet_NaN();
}

template <class T, class Conversion>
void narrow_each(const Conversion& conversion, const T* elements, uint64_t count, T* residual,
                 typename Conversion::Narrow* narrowed) {
  for (uint64_t i = 0; i < count; ++i) {
    const T wanted = residual != nullptr ? elements[i] + residual[i] : elements[i];
    narrowed[i] = conversion.to_narrow(static_cast<float>(wanted));
    if (residual == nullptr) continue;
    const T error = wanted - static_cast<T>(conversion.to_wide(narrowed[i]));
    residual[i] = std::isfinite(error) ? error : 0;
  }
}

template <class T>
void narrow_all(Payload payload, const T* elements, uint64_t count, T* residual, char* narrowed) {
  if (payload == HVL_PAYLOAD_BFLOAT16) {
    return narrow_each(AsBfloat16{}, elements, count, residual, reinterpret_cast<Bfloat16*>(narrowed));
  }
  auto* numbers = reinterpret_cast<int8_t*>(narrowed + scales_of(count) * sizeof(float));
  for (uint64_t begin = 0; begin < count; begin += kScaledElements) {
    const uint64_t length = std::min(kScaledElements, count - begin);
    T* errors = residual != nullptr ? residual + begin : nullptr;
    const AsInt8 conversion(scale_of(elements + begin, length, errors));
    std::memcpy(narrowed + begin / kScaledElements * sizeof(float), &conversion.scale, sizeof(float));
    if (std::isnan(conversion.scale)) {  // and so are all of these elements, at the server
      std::memset(numbers + begin, 0, length);
    } else {
      narrow_each(conversion, elements + begin, length, errors, numbers + begin);
    }
  }
}

template <class T>
void widen_all(Payload payload, const char* narrowed, uint64_t count, T* elements) {
  if (payload == HVL_PAYLOAD_BFLOAT16) {
    for (uint64_t i = 0; i < count; ++i) {
      Bfloat16 number;
      std::memcpy(&number, narrowed + i * sizeof number, sizeof number);
      elements[i] = static_cast<T>(hvl::widen(number));
    }
    return;
  }
  const auto* numbers = reinterpret_cast<const int8_t*>(narrowed + scales_of(count) * sizeof(float));
  for (uint64_t begin = 0; begin < count; begin += kScaledElements) {
    float scale;
    std::memcpy(&scale, narrowed + begin / kScaledElements * sizeof(float), sizeof(float));
    const uint64_t end = std::min(count, begin + kScaledElements);
    for (uint64_t i = begin; i < end; ++i) elements[i] = static_cast<T>(scale * static_cast<float>(numbers[i]));
  }
}

}  // namespace

uint64_t num_bytes_of(Payload payload, DataType dtype, uint64_t count) {
  switch (payload) {
    case HVL_PAYLOAD_FULL: return count * size_of(dtype);
    case HVL_PAYLOAD_BFLOAT16: return count * sizeof(Bfloat16);
    case HVL_PAYLOAD_INT8: return count + scales_of(count) * sizeof(float);
  }
  __builtin_unreachable();
}

void narrow(Payload payload, DataType dtype, const char* elements, uint64_t count, char* residual, char* narrowed) {
  if (dtype == HVL_FLOAT32) {
    return narrow_all(payload, reinterpret_cast<const float*>(elements), count, reinterpret_cast<float*>(residual),
                      narrowed);
  }
  narrow_all(payload, reinterpret_cast<const double*>(elements), count, reinterpret_cast<double*>(residual), narrowed);
}

void widen(Payload payload, DataType dtype, const char* narrowed, uint64_t count, char* elements) {
  if (dtype == HVL_FLOAT32) return widen_all(payload, narrowed, count, reinterpret_cast<float*>(elements));
  widen_all(payload, narrowed, count, reinterpret_cast<double*>(elements));
}

}  // namespace hvl
