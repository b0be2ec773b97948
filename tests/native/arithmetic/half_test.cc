// The conversions between float32 and the 16-bit formats, for every value of those.
#include "base/half.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "check.h"

namespace {

// A format of 16 bits: sign, exponent, and `mantissa_bits` of fraction, read by the definition.
struct Format {
  int mantissa_bits;
  int bias;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);

  uint16_t infinity() const { return static_cast<uint16_t>(0x7fff >> mantissa_bits << mantissa_bits); }

  double value_of(uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int fraction = bits & ((1 << mantissa_bits) - 1);
    const int significand = exponent == 0 ? fraction : fraction + (1 << mantissa_bits);
    const double magnitude = std::ldexp(significand, (exponent == 0 ? 1 : exponent) - bias - mantissa_bits);
    return bits & 0x8000 ? -magnitude : magnitude;
  }
};

constexpr Format kFloat16 = {10, 15, hvl::float16_to_float, hvl::float_to_float16};
constexpr Format kBfloat16 = {7, 127, hvl::bfloat16_to_float, hvl::float_to_bfloat16};

void check_every_value(const Format& format) {
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    const uint16_t magnitude = bits & 0x7fff;
    const float value = format.widen(bits);
    if (magnitude > format.infinity()) {
      REQUIRE(std::isnan(value));
      REQUIRE((format.narrow(value) & 0x7fff) > format.infinity());
      continue;
    }
    REQUIRE(format.narrow(value) == bits);
    if (magnitude == format.infinity()) {
      REQUIRE(std::isinf(value) && std::signbit(value) == (bits != magnitude));
    } else {
      REQUIRE(static_cast<double>(value) == format.value_of(bits) && std::signbit(value) == (bits != magnitude));
    }
  }
}

// Between every two neighbours: the middle goes to the even one, all else to the nearer. The neighbour of the largest
// is infinity, where the next power of two would be.
void check_every_rounding(const Format& format) {
  for (uint16_t low = 0; low < format.infinity(); ++low) {
    const uint16_t high = static_cast<uint16_t>(low + 1);
    const double between = (format.value_of(low) + format.value_of(high)) / 2;
    const float middle = static_cast<float>(between);
    REQUIRE(static_cast<double>(middle) == between);
    REQUIRE(format.narrow(middle) == (low % 2 == 0 ? low : high));
    REQUIRE(format.narrow(std::nextafter(middle, 0.0f)) == low);
    REQUIRE(format.narrow(std::nextafter(middle, std::numeric_limits<float>::infinity())) == high);
    REQUIRE(format.narrow(-middle) == ((low % 2 == 0 ? low : high) | 0x8000));
  }
}

}  // namespace

TEST(every_float16_survives_the_way_to_float32_and_back) { check_every_value(kFloat16); }
TEST(every_bfloat16_survives_the_way_to_float32_and_back) { check_every_value(kBfloat16); }
TEST(float16_rounds_to_nearest_even) { check_every_rounding(kFloat16); }
TEST(bfloat16_rounds_to_nearest_even) { check_every_rounding(kBfloat16); }

TEST(float32_out_of_range_becomes_infinity_or_zero) {
  CHECK_EQ(hvl::float_to_float16(65519.996f), 0x7bff);
  CHECK_EQ(hvl::float_to_float16(65520.0f), 0x7c00);
  CHECK_EQ(hvl::float_to_float16(-3e38f), 0xfc00);
  CHECK_EQ(hvl::float_to_float16(1e-45f), 0);
  CHECK_EQ(hvl::float_to_bfloat16(std::numeric_limits<float>::max()), 0x7f80);
  CHECK_EQ(hvl::float_to_bfloat16(-1e-45f), 0x8000);
}

TEST(a_nan_stays_one_even_if_its_payload_is_in_the_bits_cut_off) {
  for (uint32_t payload : {1u, 0x1fffu, 0xffffu, 0x7fffffu}) {
    const float nan = hvl::bit_cast<float>(0x7f800000u | payload);
    CHECK((hvl::float_to_float16(nan) & 0x7fff) > 0x7c00);
    CHECK((hvl::float_to_bfloat16(nan) & 0x7fff) > 0x7f80);
  }
}
