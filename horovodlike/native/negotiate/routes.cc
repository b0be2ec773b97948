#include "negotiate/routes.h"

#include <algorithm>

namespace hvl {

namespace {

// True for the transports of collectives that move tensors.
bool moves_tensors(int32_t transport, int32_t device) {
  switch (transport) {
    case HVL_SHARED_MEMORY:
    case HVL_TCP:
    case HVL_EXTERNAL: return device == HVL_CPU;
    case HVL_NCCL:
    case HVL_STAGING: return device == HVL_CUDA;
    default: return false;
  }
}

}  // namespace

bool implements(int32_t transport, int32_t kind, int32_t device) {
  const bool is_own = transport == HVL_SHARED_MEMORY || transport == HVL_TCP;
  if (kind == HVL_MESSAGE) return is_own && device == HVL_CPU;
  if (kind < 0 || kind >= kNumKinds) return false;
  // A collective without tensors is executed by reading the log alone.
  return has_tensors(static_cast<Kind>(kind)) ? moves_tensors(transport, device) : is_own && device == HVL_CPU;
}

bool Routes::name(hvl_transport transport) const {
  return std::any_of(rules_.begin(), rules_.end(), [&](const hvl_route& rule) { return rule.transport == transport; });
}

hvl_transport Routes::find_rule(const Signature& signature) const {
  const int64_t num_bytes = signature.num_bytes();
  const auto rule = std::find_if(rules_.begin(), rules_.end(), [&](const hvl_route& each) {
    return each.device == signature.device && each.kind == signature.kind && num_bytes < each.below;
  });
  return rule != rules_.end() ? static_cast<hvl_transport>(rule->transport) : HVL_BY_ENGINE;
}

}  // namespace hvl
