// Allreduce of a team that has members on several hosts.
//
// Each host reduces what its members have, in the order of ranks; then the hosts' results are reduced, in the order of
// hosts. float16 and bfloat16 are rounded once in between. What cannot be cut into these two steps (integers that are
// divided or scaled: what is in between may not fit) is exchanged as it is, and reduced in the order of ranks at once.
#pragma once

#include <memory>

#include "collective/hosts/hosts_collective.h"

namespace hvl {

std::unique_ptr<HostsCollective> make_hosts_allreduce(const HostsContext& context, const Batch& batch,
                                                      const FinalBytes& final_bytes);

}  // namespace hvl
