// The collectives of a team that has members on several hosts and that reduce nothing. What they are given lives as
// long as they do.
#pragma once

#include <memory>

#include "collective/hosts/hosts_collective.h"

namespace hvl {

// Along a binomial tree of hosts, from one member of each to the next; then within each host.
std::unique_ptr<HostsCollective> make_hosts_broadcast(const HostsContext& context, const Batch& batch, int root,
                                                      const FinalBytes& final_bytes);
// Each block goes once to each other host, and from there to the host's members.
std::unique_ptr<HostsCollective> make_hosts_allgather(const HostsContext& context, const Gather& gather);
// Each block goes from the one to the other.
std::unique_ptr<HostsCollective> make_hosts_alltoall(const HostsContext& context, const Exchange& exchange);

}  // namespace hvl
