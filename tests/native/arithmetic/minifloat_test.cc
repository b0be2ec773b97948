// The conversions between float32 and the minifloats, for every value of those.
#include "base/minifloat.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "check.h"

namespace {

using hvl::Bfloat16;
using hvl::Float16;
using hvl::Float8E4m3fn;
using hvl::Float8E5m2;
using hvl::narrow;
using hvl::widen;

// A minifloat, read by the definition of its format.
template <class T>
struct Definition {
  using Bits = typename T::Bits;
  static constexpr Bits kSign = static_cast<Bits>(1u << (8 * sizeof(Bits) - 1));
  static constexpr Bits kLargest = static_cast<Bits>(kSign - 1 - (T::kHasInfinity ? 1 << T::kFractionBits : 1));
  static constexpr int kBias = (1 << (T::kExponentBits - 1)) - 1;

  static double value_of(Bits bits) {
    const int exponent = (bits & (kSign - 1)) >> T::kFractionBits;
    const int fraction = bits & ((1 << T::kFractionBits) - 1);
    const int significand = exponent == 0 ? fraction : fraction + (1 << T::kFractionBits);
    const double magnitude = std::ldexp(significand, (exponent == 0 ? 1 : exponent) - kBias - T::kFractionBits);
    return bits & kSign ? -magnitude : magnitude;
  }
};

template <class T>
void check_every_value() {
  using Format = Definition<T>;
  for (uint32_t i = 0; i < 2u * Format::kSign; ++i) {
    const T number{static_cast<typename T::Bits>(i)};
    const typename T::Bits magnitude = number.bits & (Format::kSign - 1);
    const float value = widen(number);
    const bool is_infinite = T::kHasInfinity && magnitude == Format::kLargest + 1;
    REQUIRE(std::isinf(value) == is_infinite);
    REQUIRE(std::isnan(value) == (magnitude > Format::kLargest && !is_infinite));
    if (std::isnan(value)) {
      REQUIRE(std::isnan(widen(narrow<T>(value))));
      continue;
    }
    REQUIRE(narrow<T>(value).bits == number.bits);
    REQUIRE(std::signbit(value) == (number.bits != magnitude));
    REQUIRE(is_infinite || static_cast<double>(value) == Format::value_of(number.bits));
  }
}

// Between every two neighbours: the middle goes to the even one, all else to the nearer. The neighbour of the largest
// is infinity, if there is one, where the next number would be.
template <class T>
void check_every_rounding() {
  using Format = Definition<T>;
  for (typename T::Bits low = 0; low < Format::kLargest + (T::kHasInfinity ? 1 : 0); ++low) {
    const auto high = static_cast<typename T::Bits>(low + 1);
    const double between = (Format::value_of(low) + Format::value_of(high)) / 2;
    const float middle = static_cast<float>(between);
    const auto even = low % 2 == 0 ? low : high;
    REQUIRE(static_cast<double>(middle) == between);
    REQUIRE(narrow<T>(middle).bits == even);
    REQUIRE(narrow<T>(std::nextafter(middle, 0.0f)).bits == low);
    REQUIRE(narrow<T>(std::nextafter(middle, std::numeric_limits<float>::infinity())).bits == high);
    REQUIRE(narrow<T>(-middle).bits == (even | Format::kSign));
  }
}

}  // namespace

TEST(every_float16_survives_the_way_to_float32_and_back) { check_every_value<Float16>(); }
TEST(every_bfloat16_survives_the_way_to_float32_and_back) { check_every_value<Bfloat16>(); }
TEST(every_8_bit_float_survives_the_way_to_float32_and_back) {
  check_every_value<Float8E4m3fn>();
  check_every_value<Float8E5m2>();
}
TEST(float16_rounds_to_nearest_even) { check_every_rounding<Float16>(); }
TEST(bfloat16_rounds_to_nearest_even) { check_every_rounding<Bfloat16>(); }
TEST(float8_rounds_to_nearest_even) {
  check_every_rounding<Float8E4m3fn>();
  check_every_rounding<Float8E5m2>();
}

TEST(float32_out_of_range_becomes_infinity_or_zero) {
  CHECK_EQ(narrow<Float16>(65519.996f).bits, 0x7bff);
  CHECK_EQ(narrow<Float16>(65520.0f).bits, 0x7c00);
  CHECK_EQ(narrow<Float16>(-3e38f).bits, 0xfc00);
  CHECK_EQ(narrow<Float16>(1e-45f).bits, 0);
  CHECK_EQ(narrow<Bfloat16>(std::numeric_limits<float>::max()).bits, 0x7f80);
  CHECK_EQ(narrow<Bfloat16>(-1e-45f).bits, 0x8000);
  CHECK_EQ(narrow<Float8E5m2>(61439.99f).bits, 0x7b);
  CHECK_EQ(narrow<Float8E5m2>(-3e38f).bits, 0xfc);
  CHECK_EQ(narrow<Float8E5m2>(-1e-45f).bits, 0x80);
}

TEST(float8_e4m3fn_has_its_largest_number_in_place_of_infinity) {
  for (float large : {448.0f, 464.01f, 480.0f, 1e30f, std::numeric_limits<float>::infinity()}) {
    CHECK_EQ(narrow<Float8E4m3fn>(large).bits, 0x7e);
    CHECK_EQ(narrow<Float8E4m3fn>(-large).bits, 0xfe);
  }
}

TEST(a_nan_stays_one_even_if_its_payload_is_in_the_bits_cut_off) {
  for (uint32_t payload : {1u, 0x1fffu, 0xffffu, 0x7fffffu}) {
    const float nan = hvl::bit_cast<float>(0x7f800000u | payload);
    CHECK((narrow<Float16>(nan).bits & 0x7fff) > 0x7c00);
    CHECK((narrow<Bfloat16>(nan).bits & 0x7fff) > 0x7f80);
    CHECK_EQ(narrow<Float8E4m3fn>(nan).bits, 0x7f);
    CHECK_EQ(narrow<Float8E5m2>(nan).bits, 0x7f);
  }
}
