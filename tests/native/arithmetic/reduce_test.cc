// The arithmetic of the reductions: the vector kernels of every level against the scalar definition, and that against
// results worked out by hand.
#include "collective/reduce/reduce.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "base/minifloat.h"
#include "check.h"

namespace {

using hvl::CpuLevel;
using hvl::DataType;
using hvl::ReduceOp;
using hvl::Reduction;

using Bytes = std::vector<unsigned char>;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr unsigned char kGuard = 0xa5;

constexpr ReduceOp kOps[] = {HVL_AVERAGE, HVL_SUM, HVL_MIN, HVL_MAX, HVL_PRODUCT};
constexpr int kSourceCounts[] = {1, 2, 3, 4, 7, 16};
constexpr size_t kCounts[] = {0, 1, 7, 63, 64, 65, 1009, 4099};

struct Scales {
  double prescale;
  double postscale;
  int extra_divisor;  // the divisor is the number of sources, times this
};
constexpr Scales kScales[] = {{1.0, 1.0, 1}, {1.0, 1.0, 3}, {1.0 / 3.0, 1.0, 1}, {1.0, -0.7, 1}, {1.7, 0.1, 5}};

// Any bit pattern, and numbers near each other in size so that sums round: of either about half.
Bytes random_array(DataType dtype, size_t count, std::mt19937_64& random) {
  const size_t width = hvl::size_of(dtype);
  Bytes array(count * width);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = random();
    const double number = std::ldexp(static_cast<double>(random() >> 11), -52) * 2.0 - 1.0;
    unsigned char* element = array.data() + i * width;
    std::memcpy(element, &bits, width);
    if (bits >> 63 == 0) continue;
    hvl::with_type(dtype, [&](auto rounded) {
      rounded = hvl::narrow<decltype(rounded)>(number);
      if (hvl::is_floating(dtype)) std::memcpy(element, &rounded, width);
    });
  }
  return array;
}

template <class T>
T element(const void* array, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const unsigned char*>(array) + i * sizeof(T), sizeof(T));
  return value;
}

bool is_nan(DataType dtype, const void* array, size_t i) {
  return hvl::with_type(dtype, [&](auto zero) {
    if constexpr (hvl::kIsFloating<decltype(zero)>) {
      return std::isnan(hvl::widen(element<decltype(zero)>(array, i)));
    }
    return false;
  });
}

// The same bits, or NaN in both, whatever its payload.
bool same(DataType dtype, const Bytes& a, const unsigned char* b) {
  const size_t width = hvl::size_of(dtype);
  if (a.empty() || std::memcmp(a.data(), b, a.size()) == 0) return true;
  for (size_t i = 0; i < a.size() / width; ++i) {
    if (std::memcmp(a.data() + i * width, b + i * width, width) == 0) continue;
    if (!is_nan(dtype, a.data(), i) || !is_nan(dtype, b, i)) return false;
  }
  return true;
}

using Arrays = std::vector<Bytes>;

// `run` is given the sources, each at an address `shift` past an aligned one, and dst, which is source `alias` if that
// is not negative. Returns whether the result is as expected and nothing after it was written.
template <class Run>
bool reduces_to(const Bytes& expected, DataType dtype, const Arrays& arrays, int alias, size_t shift, Run run) {
  constexpr size_t kMargin = 64;
  Arrays placed;
  std::vector<const void*> sources;
  for (const Bytes& array : arrays) {
    placed.emplace_back(shift + array.size() + kMargin, kGuard);
    std::copy(array.begin(), array.end(), placed.back().begin() + static_cast<ptrdiff_t>(shift));
    sources.push_back(placed.back().data() + shift);
  }
  Bytes apart(shift + expected.size() + kMargin, kGuard);
  Bytes& target = alias >= 0 ? placed[static_cast<size_t>(alias)] : apart;
  run(sources.data(), target.data() + shift);
  const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
  const auto end = target.begin() + static_cast<ptrdiff_t>(shift + expected.size());
  return same(dtype, expected, target.data() + shift) && std::all_of(end, target.end(), is_guard);
}

std::vector<CpuLevel> levels() {
  std::vector<CpuLevel> all = {CpuLevel::kBaseline};
  for (CpuLevel level : {CpuLevel::kAvx2, CpuLevel::kAvx512}) {
    if (level <= hvl::cpu_level()) all.push_back(level);
  }
  return all;
}

std::string describe(const Reduction& reduction, size_t num_sources, size_t count, const std::string& how) {
  std::ostringstream text;
  text << how << ": " << hvl::name_of(reduction.op) << " of " << num_sources << " x " << count << " "
       << hvl::name_of(reduction.dtype) << ", scales " << reduction.prescale << " " << reduction.postscale
       << ", divisor " << reduction.divisor;
  return text.str();
}

bool has_kernel(const Reduction& reduction) {
  return reduction.dtype > HVL_INT64 || (reduction.prescale == 1.0 && reduction.postscale == 1.0);
}

void check_one(const Reduction& reduction, const Arrays& arrays, size_t count) {
  const int num_sources = static_cast<int>(arrays.size());
  const DataType dtype = reduction.dtype;
  std::vector<const void*> sources;
  for (const Bytes& array : arrays) sources.push_back(array.data());
  Bytes expected(count * hvl::size_of(dtype));
  reduce_scalar(reduction, sources.data(), num_sources, expected.data(), count);

  for (int alias : {-1, 0, 1, num_sources - 1}) {
    if (alias >= num_sources) continue;
    const size_t shift = alias < 0 ? 0 : static_cast<size_t>(2 * alias + 1);
    const bool passed = reduces_to(expected, dtype, arrays, alias, shift, [&](const void* const* from, void* to) {
      reduce(reduction, hvl::Arrays{from, num_sources, &to, 1, count});
    });
    if (!passed) CHECK_EQ(describe(reduction, arrays.size(), count, "alias " + std::to_string(alias)), "as scalar");
  }
  if (!has_kernel(reduction)) return;
  for (CpuLevel level : levels()) {
    const bool passed = reduces_to(expected, dtype, arrays, -1, 3, [&](const void* const* from, void* to) {
      reduce_at(level, reduction, hvl::Arrays{from, num_sources, &to, 1, count});
    });
    const std::string how = "level " + std::to_string(static_cast<int>(level));
    if (!passed) CHECK_EQ(describe(reduction, arrays.size(), count, how), "as scalar");
  }
}

// All sources but the first are overwritten with the result, as the slots of an allreduce are.
void check_many_results(const Reduction& reduction, const Arrays& arrays, size_t count) {
  Arrays overwritten = arrays;
  Bytes apart(count * hvl::size_of(reduction.dtype));
  Bytes expected(apart.size());
  std::vector<const void*> sources;
  std::vector<void*> dsts = {apart.data()};
  for (Bytes& array : overwritten) {
    sources.push_back(array.data());
    if (sources.size() > 1) dsts.push_back(array.data());
  }
  const int num_sources = static_cast<int>(sources.size());
  reduce_scalar(reduction, sources.data(), num_sources, expected.data(), count);
  reduce(reduction, hvl::Arrays{sources.data(), num_sources, dsts.data(), static_cast<int>(dsts.size()), count});
  for (const void* dst : dsts) {
    if (same(reduction.dtype, expected, static_cast<const unsigned char*>(dst))) continue;
    CHECK_EQ(describe(reduction, arrays.size(), count, "many results"), "as scalar");
  }
  CHECK(overwritten[0] == arrays[0]);
}

void check_dtype(DataType dtype) {
  std::mt19937_64 random(static_cast<uint64_t>(dtype) + 1);
  for (int num_sources : kSourceCounts) {
    for (size_t count : kCounts) {
      if (count > 2000 && num_sources > 3) continue;  // nothing new, and slow under a sanitizer
      Arrays arrays;
      for (int i = 0; i < num_sources; ++i) arrays.push_back(random_array(dtype, count, random));
      for (ReduceOp op : kOps) {
        if (hvl::why_not_reducible(dtype, op) != nullptr) continue;
        for (const Scales& scales : kScales) {
          const Reduction reduction = {dtype, op, scales.prescale, scales.postscale,
                                       num_sources * scales.extra_divisor};
          check_one(reduction, arrays, count);
          check_many_results(reduction, arrays, count);
        }
      }
    }
  }
}

// Each inner vector is one source.
template <class T>
std::vector<T> reduced(const Reduction& reduction, const std::vector<std::vector<T>>& sources) {
  std::vector<const void*> addresses;
  for (const std::vector<T>& source : sources) addresses.push_back(source.data());
  std::vector<T> result(sources[0].size());
  std::vector<T> scalar(result.size());
  const int num_sources = static_cast<int>(sources.size());
  void* dst = result.data();
  reduce(reduction, hvl::Arrays{addresses.data(), num_sources, &dst, 1, result.size()});
  reduce_scalar(reduction, addresses.data(), num_sources, scalar.data(), scalar.size());
  CHECK(std::memcmp(result.data(), scalar.data(), result.size() * sizeof(T)) == 0 || reduction.dtype > HVL_INT64);
  return result;
}

Reduction average(DataType dtype, int divisor) { return {dtype, HVL_AVERAGE, 1.0, 1.0, divisor}; }
Reduction plain(DataType dtype, ReduceOp op) { return {dtype, op, 1.0, 1.0, 1}; }

template <class T>
using List = std::vector<T>;

}  // namespace

TEST(uint8_as_scalar) { check_dtype(HVL_UINT8); }
TEST(int8_as_scalar) { check_dtype(HVL_INT8); }
TEST(uint16_as_scalar) { check_dtype(HVL_UINT16); }
TEST(int16_as_scalar) { check_dtype(HVL_INT16); }
TEST(int32_as_scalar) { check_dtype(HVL_INT32); }
TEST(int64_as_scalar) { check_dtype(HVL_INT64); }
TEST(float16_as_scalar) { check_dtype(HVL_FLOAT16); }
TEST(float32_as_scalar) { check_dtype(HVL_FLOAT32); }
TEST(float64_as_scalar) { check_dtype(HVL_FLOAT64); }
TEST(bool_as_scalar) { check_dtype(HVL_BOOL); }
TEST(bfloat16_as_scalar) { check_dtype(HVL_BFLOAT16); }
TEST(float8_e4m3fn_as_scalar) { check_dtype(HVL_FLOAT8_E4M3FN); }
TEST(float8_e5m2_as_scalar) { check_dtype(HVL_FLOAT8_E5M2); }

TEST(the_result_does_not_depend_on_how_the_array_is_cut) {
  constexpr size_t kCount = 4099;
  std::mt19937_64 random(7);
  for (DataType dtype : {HVL_FLOAT32, HVL_FLOAT16, HVL_BFLOAT16, HVL_FLOAT64, HVL_FLOAT8_E4M3FN}) {
    const size_t width = hvl::size_of(dtype);
    Arrays arrays;
    for (int i = 0; i < 3; ++i) arrays.push_back(random_array(dtype, kCount, random));
    const void* sources[] = {arrays[0].data(), arrays[1].data(), arrays[2].data()};
    const Reduction reduction = {dtype, HVL_AVERAGE, 1.25, 0.3, 3};
    Bytes whole(kCount * width);
    void* dst = whole.data();
    reduce(reduction, hvl::Arrays{sources, 3, &dst, 1, kCount});
    for (size_t step : {1, 13, 64, 1000}) {
      Bytes pieces(kCount * width);
      for (size_t first = 0; first < kCount; first += step) {
        const void* from[3];
        for (int i = 0; i < 3; ++i) from[i] = arrays[static_cast<size_t>(i)].data() + first * width;
        dst = pieces.data() + first * width;
        reduce(reduction, hvl::Arrays{from, 3, &dst, 1, std::min(step, kCount - first)});
      }
      CHECK(same(dtype, whole, pieces.data()));
    }
  }
}

TEST(integer_sum_and_product_wrap) {
  CHECK(reduced<uint8_t>(plain(HVL_UINT8, HVL_SUM), {{200, 255}, {100, 1}}) == List<uint8_t>({44, 0}));
  CHECK(reduced<int8_t>(plain(HVL_INT8, HVL_SUM), {{100, -128}, {100, -1}}) == List<int8_t>({-56, 127}));
  CHECK(reduced<uint16_t>(plain(HVL_UINT16, HVL_PRODUCT), {{300, 65535}, {300, 65535}}) == List<uint16_t>({24464, 1}));
  constexpr int32_t kMax32 = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMin64 = std::numeric_limits<int64_t>::min();
  CHECK(reduced<int32_t>(plain(HVL_INT32, HVL_SUM), {{kMax32}, {1}}) == List<int32_t>({-kMax32 - 1}));
  CHECK(reduced<int64_t>(plain(HVL_INT64, HVL_PRODUCT), {{kMin64, 3}, {-1, -4}}) == List<int64_t>({kMin64, -12}));
}

TEST(integer_average_does_not_overflow_and_truncates_toward_zero) {
  const List<List<int8_t>> large = {{127, -128, 100}, {127, -128, -1}, {127, -128, -128}, {127, -128, 28}};
  CHECK(reduced(average(HVL_INT8, 4), large) == List<int8_t>({127, -128, 0}));
  CHECK(reduced<int8_t>(average(HVL_INT8, 2), {{-3, 3, -7, 1}, {0, 0, 0, -2}}) == List<int8_t>({-1, 1, -3, 0}));
  CHECK(reduced<int16_t>(average(HVL_INT16, 3), {{-5, 5, 32767}, {0, 0, 32767}}) == List<int16_t>({-1, 1, 21844}));
  CHECK(reduced<uint16_t>(average(HVL_UINT16, 2), {{65535}, {65535}}) == List<uint16_t>({65535}));
  constexpr int32_t kMin32 = std::numeric_limits<int32_t>::min();
  CHECK(reduced<int32_t>(average(HVL_INT32, 2), {{kMin32, -1}, {kMin32, 0}}) == List<int32_t>({kMin32, 0}));
  // Beyond 2^53, where a double would be off by one.
  CHECK(reduced<int64_t>(average(HVL_INT64, 3), {{9007199254740993 * 3}}) == List<int64_t>({9007199254740993}));
  CHECK(reduced<int64_t>(average(HVL_INT64, 7), {{(int64_t{1} << 52) - 1}}) == List<int64_t>({643371375338642}));
}

TEST(scaled_integers_are_truncated_and_saturate) {
  const Reduction halved = {HVL_INT32, HVL_SUM, 0.5, 1.0, 1};
  CHECK(reduced<int32_t>(halved, {{3, -3}, {3, -3}}) == List<int32_t>({2, -2}));
  const Reduction doubled = {HVL_UINT8, HVL_SUM, 1.0, 2.0, 1};
  CHECK(reduced<uint8_t>(doubled, {{100, 1}, {100, 2}}) == List<uint8_t>({255, 6}));
  const Reduction negated = {HVL_UINT8, HVL_MAX, 1.0, -1.0, 1};
  CHECK(reduced<uint8_t>(negated, {{100}, {1}}) == List<uint8_t>({0}));
  const Reduction huge = {HVL_INT64, HVL_SUM, 1.0, 1e300, 1};
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  CHECK(reduced<int64_t>(huge, {{1, -1, 0}}) == List<int64_t>({kMax, -kMax - 1, 0}));
  const Reduction undefined = {HVL_INT16, HVL_SUM, 1.0, static_cast<double>(kNan), 1};
  CHECK(reduced<int16_t>(undefined, {{7}}) == List<int16_t>({0}));
}

TEST(bool_sum_and_max_are_or_product_and_min_are_and) {
  const List<List<uint8_t>> sources = {{0, 0, 1, 2}, {0, 1, 0, 255}};
  for (ReduceOp op : {HVL_SUM, HVL_MAX}) CHECK(reduced(plain(HVL_BOOL, op), sources) == List<uint8_t>({0, 1, 1, 1}));
  for (ReduceOp op : {HVL_PRODUCT, HVL_MIN}) {
    CHECK(reduced(plain(HVL_BOOL, op), sources) == List<uint8_t>({0, 0, 0, 1}));
  }
}

TEST(half_precision_is_accumulated_in_float32_and_rounded_once) {
  const auto half = [](float value) { return hvl::narrow<hvl::Float16>(value).bits; };
  const auto brain = [](float value) { return hvl::narrow<hvl::Bfloat16>(value).bits; };
  // Rounded after each step, 2048 + 1 + 1 would be 2048, and 60000 + 60000 infinite.
  const List<List<uint16_t>> halves = {{half(2048), half(60000)}, {half(1), half(60000)}, {half(1), half(-60000)}};
  CHECK(reduced(plain(HVL_FLOAT16, HVL_SUM), halves) == List<uint16_t>({half(2050), half(60000)}));
  CHECK(reduced<uint16_t>(average(HVL_FLOAT16, 2), {{half(65504)}, {half(65504)}}) == List<uint16_t>({half(65504)}));
  const List<List<uint16_t>> brains = {{brain(256)}, {brain(1)}, {brain(1)}};
  CHECK(reduced(plain(HVL_BFLOAT16, HVL_SUM), brains) == List<uint16_t>({brain(258)}));
}

TEST(float8_is_accumulated_in_float32_and_rounded_once) {
  const auto e4m3 = [](float value) { return hvl::narrow<hvl::Float8E4m3fn>(value).bits; };
  const auto e5m2 = [](float value) { return hvl::narrow<hvl::Float8E5m2>(value).bits; };
  // Rounded after each step, 16 + 1 + 1 would be 16, 8 + 1 + 1 would be 8, and 448 + 448 out of range.
  const List<List<uint8_t>> fours = {{e4m3(16), e4m3(448)}, {e4m3(1), e4m3(448)}, {e4m3(1), e4m3(-448)}};
  CHECK(reduced(plain(HVL_FLOAT8_E4M3FN, HVL_SUM), fours) == List<uint8_t>({e4m3(18), e4m3(448)}));
  const List<List<uint8_t>> fives = {{e5m2(8), e5m2(57344)}, {e5m2(1), e5m2(57344)}, {e5m2(1), e5m2(-57344)}};
  CHECK(reduced(plain(HVL_FLOAT8_E5M2, HVL_SUM), fives) == List<uint8_t>({e5m2(10), e5m2(57344)}));
  CHECK(reduced<uint8_t>(average(HVL_FLOAT8_E4M3FN, 2), {{e4m3(448)}, {e4m3(448)}}) == List<uint8_t>({e4m3(448)}));
  CHECK(reduced<uint8_t>(plain(HVL_FLOAT8_E4M3FN, HVL_SUM), {{e4m3(448)}, {e4m3(448)}}) == List<uint8_t>({0x7e}));
  CHECK(reduced<uint8_t>(plain(HVL_FLOAT8_E5M2, HVL_SUM), {{e5m2(57344)}, {e5m2(57344)}}) == List<uint8_t>({0x7c}));
}

TEST(float_average_divides_exactly) {
  List<float> values(1000);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) * 1.1f;
  const List<float> zeros(values.size());
  for (int divisor : {2, 3, 7, 1024}) {
    const List<float> result = reduced<float>(average(HVL_FLOAT32, divisor), {values, zeros});
    for (size_t i = 0; i < values.size(); ++i) REQUIRE(result[i] == values[i] / static_cast<float>(divisor));
  }
  const Reduction scaled = {HVL_FLOAT64, HVL_AVERAGE, 2.0, 0.25, 3};
  CHECK(reduced<double>(scaled, {{1.0}, {2.0}, {6.0}}) == List<double>({1.5}));
}

TEST(min_and_max_propagate_nan_from_any_source) {
  const List<List<float>> sources = {{kNan, 1, 2, kInf}, {1, kNan, 3, 5}, {2, 3, -1, -kInf}};
  const List<float> least = reduced(plain(HVL_FLOAT32, HVL_MIN), sources);
  const List<float> most = reduced(plain(HVL_FLOAT32, HVL_MAX), sources);
  CHECK(std::isnan(least[0]) && std::isnan(least[1]) && least[2] == -1 && least[3] == -kInf);
  CHECK(std::isnan(most[0]) && std::isnan(most[1]) && most[2] == 3 && most[3] == kInf);
}

TEST(infinities_and_zeros_follow_ieee_754) {
  const List<float> sum = reduced<float>(plain(HVL_FLOAT32, HVL_SUM), {{kInf, kInf, -0.0f}, {-kInf, 1, -0.0f}});
  CHECK(std::isnan(sum[0]) && sum[1] == kInf && std::signbit(sum[2]));
  const List<float> nothing = reduced<float>({HVL_FLOAT32, HVL_SUM, 0.0, 1.0, 1}, {{kInf, 3}, {1, 3}});
  CHECK(std::isnan(nothing[0]) && nothing[1] == 0);
  const List<float> tiny = reduced<float>(average(HVL_FLOAT32, 2), {{1e-45f, 3e-45f}, {0, 0}});
  CHECK(tiny[0] == 0 && tiny[1] == 1e-45f * 1);
}

TEST(what_cannot_be_reduced_is_refused_with_a_reason) {
  for (DataType dtype : hvl::kDataTypes) {
    for (ReduceOp op : kOps) {
      CHECK_EQ(hvl::why_not_reducible(dtype, op) != nullptr, dtype == HVL_BOOL && op == HVL_AVERAGE);
    }
    CHECK_EQ(hvl::why_not_reducible(dtype, HVL_ADASUM) != nullptr, !hvl::is_floating(dtype));
  }
  CHECK(hvl::why_not_reducible(static_cast<DataType>(hvl::kNumDataTypes), HVL_SUM) != nullptr);
}
