// The update rules of a parameter server: how a pushed array changes the elements of a shard.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"
#include "base/types.h"

namespace hvl {

enum class Rule : uint8_t {
  kZero,      // e = 0; nothing is pushed
  kCopy,      // e = x
  kAdd,       // e += x
  kScaleAdd,  // e += scale * x
  kMax,       // e = max(e, x), NaN if either is
  kMin,       // likewise
  kSgd,       // e -= lr * x
  kMomentum,  // v = momentum * v + x; e -= lr * v
  kAdam       // Kingma and Ba, https://arxiv.org/abs/1412.6980, in the order of operations of torch.optim.Adam
};

constexpr int kMostRuleArguments = 4;
constexpr int kMostSlots = 2;

// A rule with its arguments: kScaleAdd has scale; kSgd lr; kMomentum lr, momentum; kAdam lr, beta1, beta2, epsilon.
struct Update {
  Rule rule = Rule::kAdd;
  double arguments[kMostRuleArguments] = {};
};

// Consecutive elements of a shard, and what their rules remember.
struct Elements {
  DataType dtype;
  char* values;
  char* slots[kMostSlots];  // arrays like `values`, which begin with zeros: num_slots() of them
  uint64_t num_updates;     // kAdam: by the rule, this one included
  size_t count;
};

const char* name_of(Rule rule);
// False: there is no such rule.
bool find_rule(const std::string& name, Rule* rule);
int num_arguments(Rule rule);
int num_slots(Rule rule);
inline bool has_payload(Rule rule) { return rule != Rule::kZero; }

// An error says why the rule cannot be applied to elements of this type, or which argument is not finite.
Status check(const Update& update, DataType dtype);

// Applies an update that check() has found right. `pushed`: as many elements of the same type; null for kZero.
void apply(const Update& update, const char* pushed, const Elements& elements);

}  // namespace hvl
