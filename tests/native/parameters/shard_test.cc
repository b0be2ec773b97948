// Shards of a parameter server, and its rules, against their definitions.
#include "parameters/shard.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "check.h"

namespace hvl {
namespace {

const std::vector<uint64_t> kCounts = {1, 7, kBlockElements, 2 * kBlockElements + 1001};

template <class T>
std::vector<T> typed_numbers(uint64_t count, int seed) {
  std::vector<T> made(count);
  for (size_t i = 0; i < count; ++i) made[i] = static_cast<T>(static_cast<double>((i * 7919 + seed) % 101) / 8 - 5);
  return made;
}

template <class T>
std::vector<T> values_of(const Shard& shard) {
  const T* values = reinterpret_cast<const T*>(shard.values());
  return std::vector<T>(values, values + shard.count());
}

template <class T>
void push(Shard* shard, const Update& update, const std::vector<T>& pushed, uint64_t offset = 0) {
  const Status status = shard->apply(update, offset, pushed.size(), reinterpret_cast<const char*>(pushed.data()));
  CHECK_EQ(status.message(), "");
}

// Calls function(shard, initial values, pushed values) for shards of several sizes that have values already.
template <class T, typename Function>
void on_shards(DataType dtype, Function&& function) {
  for (uint64_t count : kCounts) {
    Shard shard(dtype, count);
    CHECK(values_of<T>(shard) == std::vector<T>(count));
    const std::vector<T> initial = typed_numbers<T>(count, 3), pushed = typed_numbers<T>(count, 50);
    push(&shard, Update{Rule::kCopy, {}}, initial);
    CHECK(values_of<T>(shard) == initial);
    function(&shard, initial, pushed);
  }
}

template <class T, typename Expected>
void check_rule(DataType dtype, const Update& update, Expected&& expected) {
  on_shards<T>(dtype, [&](Shard* shard, std::vector<T> values, const std::vector<T>& pushed) {
    push(shard, update, pushed);
    for (size_t i = 0; i < values.size(); ++i) values[i] = expected(values[i], pushed[i]);
    CHECK(values_of<T>(*shard) == values);
  });
}

template <class T>
void check_rules_of_any_type(DataType dtype) {
  check_rule<T>(dtype, Update{Rule::kAdd, {}}, [](T e, T x) { return static_cast<T>(e + x); });
  check_rule<T>(dtype, Update{Rule::kMax, {}}, [](T e, T x) { return e > x ? e : x; });
  check_rule<T>(dtype, Update{Rule::kMin, {}}, [](T e, T x) { return e < x ? e : x; });
  on_shards<T>(dtype, [](Shard* shard, const std::vector<T>& initial, const std::vector<T>&) {
    CHECK(shard->apply(Update{Rule::kZero, {}}, 0, initial.size(), nullptr).ok());
    CHECK(values_of<T>(*shard) == std::vector<T>(initial.size()));
  });
}

template <class T>
void check_rules_of_floats(DataType dtype) {
  const T lr = static_cast<T>(0.1), scale = static_cast<T>(-1.75), decay = static_cast<T>(0.9);
  check_rule<T>(dtype, Update{Rule::kScaleAdd, {-1.75}}, [&](T e, T x) { return e + scale * x; });
  check_rule<T>(dtype, Update{Rule::kSgd, {0.1}}, [&](T e, T x) { return e - lr * x; });
  on_shards<T>(dtype, [&](Shard* shard, std::vector<T> values, const std::vector<T>& pushed) {
    std::vector<T> velocity(values.size());
    for (int step = 0; step < 3; ++step) {
      push(shard, Update{Rule::kMomentum, {0.1, 0.9}}, pushed);
      for (size_t i = 0; i < values.size(); ++i) {
        velocity[i] = decay * velocity[i] + pushed[i];
        values[i] = values[i] - lr * velocity[i];
      }
    }
    CHECK(values_of<T>(*shard) == values);
  });
}

TEST(rules_of_every_type) {
  check_rules_of_any_type<float>(HVL_FLOAT32);
  check_rules_of_any_type<double>(HVL_FLOAT64);
  check_rules_of_any_type<int32_t>(HVL_INT32);
  check_rules_of_any_type<int64_t>(HVL_INT64);
}

TEST(rules_of_floating_point_numbers) {
  check_rules_of_floats<float>(HVL_FLOAT32);
  check_rules_of_floats<double>(HVL_FLOAT64);
}

// In double precision, by the formulas of the paper.
TEST(adam) {
  const double lr = 0.01, beta1 = 0.9, beta2 = 0.99, epsilon = 1e-8;
  on_shards<double>(HVL_FLOAT64, [&](Shard* shard, std::vector<double> values, const std::vector<double>& pushed) {
    std::vector<double> mean(values.size()), square(values.size());
    for (int step = 1; step <= 3; ++step) {
      push(shard, Update{Rule::kAdam, {lr, beta1, beta2, epsilon}}, pushed);
      for (size_t i = 0; i < values.size(); ++i) {
        mean[i] = beta1 * mean[i] + (1 - beta1) * pushed[i];
        square[i] = beta2 * square[i] + (1 - beta2) * pushed[i] * pushed[i];
        const double unbiased = mean[i] / (1 - std::pow(beta1, step));
        values[i] -= lr * unbiased / (std::sqrt(square[i] / (1 - std::pow(beta2, step))) + epsilon);
      }
    }
    const std::vector<double> updated = values_of<double>(*shard);
    double worst = 0;
    for (size_t i = 0; i < values.size(); ++i) worst = std::fmax(worst, std::fabs(updated[i] - values[i]));
    CHECK(worst < 1e-12);
  });
}

// As if each block were a shard of its own: those that are not pushed keep their count of updates.
TEST(a_push_of_some_elements_leaves_the_others_alone) {
  const Update adam = Update{Rule::kAdam, {0.01, 0.9, 0.99, 1e-8}};
  const uint64_t count = 3 * kBlockElements, offset = kBlockElements - 10;
  Shard whole(HVL_FLOAT64, count), part(HVL_FLOAT64, kBlockElements);
  const std::vector<double> all = typed_numbers<double>(count, 1), some = typed_numbers<double>(20, 2);
  push(&whole, adam, all);
  push(&whole, adam, some, offset);
  push(&part, adam, std::vector<double>(all.begin(), all.begin() + kBlockElements));
  push(&part, adam, std::vector<double>(some.begin(), some.begin() + 10), offset);
  const std::vector<double> values = values_of<double>(whole), expected = values_of<double>(part);
  CHECK(std::equal(expected.begin(), expected.end(), values.begin()));
  Shard last(HVL_FLOAT64, kBlockElements);
  push(&last, adam, std::vector<double>(all.begin() + 2 * kBlockElements, all.end()));
  const std::vector<double> untouched = values_of<double>(last);
  CHECK(std::equal(untouched.begin(), untouched.end(), values.begin() + 2 * kBlockElements));
}

TEST(a_rule_that_cannot_be_applied_changes_nothing) {
  const double infinity = std::numeric_limits<double>::infinity();
  Shard integers(HVL_INT64, 4), floats(HVL_FLOAT32, 4);
  const std::vector<int64_t> pushed = {1, 2, 3, 4};
  const char* data = reinterpret_cast<const char*>(pushed.data());
  push(&integers, Update{Rule::kCopy, {}}, pushed);
  const Status no_floats = integers.apply(Update{Rule::kSgd, {0.1}}, 0, 4, data);
  CHECK_EQ(no_floats.code(), HVL_INVALID_ARGUMENT);
  CHECK_HAS(no_floats.message(), "'sgd' is for float32 and float64, and the parameters are int64");
  CHECK_HAS(floats.apply(Update{Rule::kMomentum, {0.1, infinity}}, 0, 4, data).message(),
            "argument 2 of the rule 'momentum' is not finite");
  for (const auto& [offset, count] : {std::pair<uint64_t, uint64_t>{0, 5}, {5, 0}, {2, UINT64_MAX}}) {
    CHECK_EQ(integers.apply(Update{Rule::kAdd, {}}, offset, count, data).code(), HVL_INVALID_ARGUMENT);
  }
  CHECK(values_of<int64_t>(integers) == pushed);
  CHECK(values_of<float>(floats) == std::vector<float>(4));
}

TEST(rules_by_name) {
  for (const char* name : {"zero", "copy", "add", "scale_add", "max", "min", "sgd", "momentum", "adam"}) {
    Rule rule;
    REQUIRE(find_rule(name, &rule));
    CHECK_EQ(std::string(name_of(rule)), name);
  }
  Rule rule;
  CHECK(!find_rule("none", &rule));
}

}  // namespace
}  // namespace hvl
