// Reducescatter of a team that has members on several hosts. The bits are those of an allreduce.
#pragma once

#include <memory>

#include "collective/hosts/hosts_collective.h"

namespace hvl {

// `scatter` lives as long as what is returned.
std::unique_ptr<HostsCollective> make_hosts_reducescatter(const HostsContext& context, const Scatter& scatter);

}  // namespace hvl
