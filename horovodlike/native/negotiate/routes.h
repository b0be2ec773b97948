// The choice of the transport by an operation's device, kind and size.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "negotiate/signature.h"

namespace hvl {

// True if the engine has this hvl_transport for this hvl_kind, or HVL_MESSAGE, on this hvl_device.
bool implements(int32_t transport, int32_t kind, int32_t device);

// The rules of a job, see hvl_route. A tensor's own size counts, not its batch's size: batches depend on when tensors
// are ready, and so would the order in which numbers are added up.
class Routes {
 public:
  Routes() = default;
  explicit Routes(std::vector<hvl_route> rules) : rules_(std::move(rules)) {}

  // True if a rule names this transport.
  bool name(hvl_transport transport) const;
  hvl_transport find(const Signature& signature) const { return rules_.empty() ? HVL_BY_ENGINE : find_rule(signature); }

 private:
  hvl_transport find_rule(const Signature& signature) const;

  std::vector<hvl_route> rules_;
};

}  // namespace hvl
