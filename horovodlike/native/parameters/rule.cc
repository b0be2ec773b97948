#include "parameters/rule.h"

#include <cmath>
#include <cstring>
#include <iterator>

#include "collective/reduce/reduce.h"

namespace hvl {

namespace {

struct Traits {
  const char* name;
  int num_arguments;
  int num_slots;
};

constexpr Traits kTraits[] = {{"zero", 0, 0}, {"copy", 0, 0}, {"add", 0, 0},      {"scale_add", 1, 0}, {"max", 0, 0},
                              {"min", 0, 0},  {"sgd", 1, 0},  {"momentum", 2, 1}, {"adam", 4, 2}};
constexpr Traits kNoTraits{"", 0, 0};

const Traits& traits_of(Rule rule) { return rule == Rule::kNamed ? kNoTraits : kTraits[static_cast<size_t>(rule)]; }

void combine(ReduceOp op, const char* pushed, const Elements& elements) {
  Reduction reduction;
  reduction.dtype = elements.dtype;
  reduction.op = op;
  const void* sources[] = {elements.values, pushed};
  void* dst = elements.values;
  reduce(reduction, {sources, 2, &dst, 1, elements.count});
}

template <class T>
void add_scaled(double scale, const T* pushed, const Elements& elements) {
  T* values = reinterpret_cast<T*>(elements.values);
  const T factor = static_cast<T>(scale);
  for (size_t i = 0; i < elements.count; ++i) values[i] += factor * pushed[i];
}

template <class T>
void momentum(const double* arguments, const T* pushed, const Elements& elements) {
  T* values = reinterpret_cast<T*>(elements.values);
  T* velocity = reinterpret_cast<T*>(elements.slots[0]);
  const T lr = static_cast<T>(arguments[0]), decay = static_cast<T>(arguments[1]);
  for (size_t i = 0; i < elements.count; ++i) {
    velocity[i] = decay * velocity[i] + pushed[i];
    values[i] += -lr * velocity[i];
  }
}

template <class T>
void adam(const double* arguments, const T* pushed, const Elements& elements) {
  T* values = reinterpret_cast<T*>(elements.values);
  T* mean = reinterpret_cast<T*>(elements.slots[0]);
  T* square = reinterpret_cast<T*>(elements.slots[1]);
  const double beta1 = arguments[1], beta2 = arguments[2], updates = static_cast<double>(elements.num_updates);
  const T step = static_cast<T>(-arguments[0] / (1 - std::pow(beta1, updates)));
  const T correction = static_cast<T>(std::sqrt(1 - std::pow(beta2, updates)));
  const T weight = static_cast<T>(1 - beta1), decay = static_cast<T>(beta2), fresh = static_cast<T>(1 - beta2);
  const T epsilon = static_cast<T>(arguments[3]);
  for (size_t i = 0; i < elements.count; ++i) {
    mean[i] += weight * (pushed[i] - mean[i]);
    square[i] = square[i] * decay + fresh * pushed[i] * pushed[i];
    values[i] += step * (mean[i] / (std::sqrt(square[i]) / correction + epsilon));
  }
}

template <class T>
void apply_with_arguments(const Update& update, const char* pushed, const Elements& elements) {
  const T* typed = reinterpret_cast<const T*>(pushed);
  switch (update.rule) {
    case Rule::kScaleAdd: return add_scaled(update.arguments[0], typed, elements);
    case Rule::kSgd: return add_scaled(-update.arguments[0], typed, elements);
    case Rule::kMomentum: return momentum(update.arguments, typed, elements);
    case Rule::kAdam: return adam(update.arguments, typed, elements);
    case Rule::kZero:
    case Rule::kCopy:
    case Rule::kAdd:
    case Rule::kMax:
    case Rule::kMin:
    case Rule::kNamed: return;  // apply() does these, and the user
  }
}

}  // namespace

void copy_bytes(const char* from, char* to, size_t num_bytes) {
  Reduction none;
  none.dtype = HVL_UINT8;
  none.op = HVL_SUM;
  const void* source = from;
  void* dst = to;
  reduce(none, {&source, 1, &dst, 1, num_bytes});
}

const char* name_of(Rule rule) { return traits_of(rule).name; }
int num_arguments(const Update& update) {
  return update.rule == Rule::kNamed ? update.num_arguments : traits_of(update.rule).num_arguments;
}
int num_slots(Rule rule) { return traits_of(rule).num_slots; }

bool find_rule(const std::string& name, Rule* rule) {
  for (size_t index = 0; index < std::size(kTraits); ++index) {
    if (name != kTraits[index].name) continue;
    *rule = static_cast<Rule>(index);
    return true;
  }
  return false;
}

Status check(const Update& update, DataType dtype) {
  const std::string name = update.rule == Rule::kNamed ? update.name : name_of(update.rule);
  const std::string rule = "the rule '" + name + "'";
  const bool needs_floats = update.rule != Rule::kNamed && num_arguments(update) > 0;
  if (needs_floats && dtype != HVL_FLOAT32 && dtype != HVL_FLOAT64) {
    return Status(HVL_INVALID_ARGUMENT,
                  rule + " is for float32 and float64, and the parameters are " + kDataTypeNames[dtype]);
  }
  for (int index = 0; index < num_arguments(update); ++index) {
    if (std::isfinite(update.arguments[index])) continue;
    return Status(HVL_INVALID_ARGUMENT, "argument " + std::to_string(index + 1) + " of " + rule + " is not finite");
  }
  return Status();
}

Status UserRules::apply(const Update& update, DataType dtype, void* values, const void* pushed, uint64_t count) const {
  if (function == nullptr) {
    std::string names;
    for (const Traits& each : kTraits) names += std::string(names.empty() ? "" : ", ") + each.name;
    return Status(HVL_INVALID_ARGUMENT, "there is no rule '" + update.name + "': the rules are " + names);
  }
  char error[HVL_PARAMETERS_ERROR_BYTES] = "";
  const int32_t result = function(context, update.name.c_str(), update.arguments, update.num_arguments, dtype, values,
                                  pushed, static_cast<int64_t>(count), error);
  if (result == 0) return Status();
  error[sizeof error - 1] = '\0';
  return Status(HVL_INVALID_ARGUMENT, error[0] != '\0' ? error : "the rule '" + update.name + "' has failed");
}

void apply(const Update& update, const char* pushed, const Elements& elements) {
  const size_t num_bytes = elements.count * size_of(elements.dtype);
  if (num_bytes == 0) return;
  switch (update.rule) {
    case Rule::kZero: std::memset(elements.values, 0, num_bytes); return;
    case Rule::kCopy: return copy_bytes(pushed, elements.values, num_bytes);
    case Rule::kAdd: return combine(HVL_SUM, pushed, elements);
    case Rule::kMax: return combine(HVL_MAX, pushed, elements);
    case Rule::kMin: return combine(HVL_MIN, pushed, elements);
    case Rule::kScaleAdd:
    case Rule::kSgd:
    case Rule::kMomentum:
    case Rule::kAdam: break;
    case Rule::kNamed: return;
  }
  if (elements.dtype == HVL_FLOAT32) return apply_with_arguments<float>(update, pushed, elements);
  apply_with_arguments<double>(update, pushed, elements);
}

}  // namespace hvl
