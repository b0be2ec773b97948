// The update rules of a parameter server: how a pushed array changes the elements of a shard.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>

#include "base/status.h"
#include "base/types.h"
#include "hvl_parameters.h"

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
  kAdam,      // Kingma and Ba, https://arxiv.org/abs/1412.6980, in the order of operations of torch.optim.Adam
  kNamed      // a rule of the user, which the server knows by its name
};

constexpr int kMostRuleArguments = HVL_PARAMETERS_ARGUMENTS;
constexpr int kMostSlots = 2;

// A rule with its arguments: kScaleAdd has scale; kSgd lr; kMomentum lr, momentum; kAdam lr, beta1, beta2, epsilon.
struct Update {
  Update() = default;
  Update(Rule of, std::initializer_list<double> given) : rule(of) {
    std::copy_n(given.begin(), std::min(given.size(), std::size(arguments)), arguments);
  }

  Rule rule = Rule::kAdd;
  double arguments[kMostRuleArguments] = {};
  int num_arguments = 0;  // kNamed only; other rules have num_arguments()
  std::string name;       // kNamed only
};

// Carries out the rules of the user.
struct UserRules {
  hvl_parameters_rule function = nullptr;
  void* context = nullptr;

  Status apply(const Update& update, DataType dtype, void* values, const void* pushed, uint64_t count) const;
};

// Consecutive elements of a shard, and the state of their rules.
struct Elements {
  DataType dtype;
  char* values;
  char* slots[kMostSlots];  // arrays like `values`, which begin with zeros: num_slots() of them
  uint64_t num_updates;     // kAdam: by the rule, this one included
  size_t count;
};

// As memcpy(), by the vectors of reduce() with one source: the two may have different alignments.
void copy_bytes(const char* from, char* to, size_t num_bytes);

const char* name_of(Rule rule);
// False: there is no such rule; one of the user may have the name.
bool find_rule(const std::string& name, Rule* rule);
int num_arguments(const Update& update);
int num_slots(Rule rule);
inline bool has_payload(Rule rule) { return rule != Rule::kZero; }

// An error says why the rule cannot be applied to elements of this type, or which argument is not finite.
Status check(const Update& update, DataType dtype);

// Applies an update that check() has found right, except kNamed. `pushed`: elements of the same number and type; null
// for kZero.
void apply(const Update& update, const char* pushed, const Elements& elements);

}  // namespace hvl
