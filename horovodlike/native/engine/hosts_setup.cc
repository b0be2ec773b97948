#include "engine/hosts_setup.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "collective/hosts/hosts_data_plane.h"
#include "control/tree_control.h"

namespace hvl {

namespace {

int duplicate(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy == -1) throw std::runtime_error(std::string("cannot duplicate a connection: ") + strerror(errno));
  return copy;
}

void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

int host_of(const EngineOptions& options, int rank) { return options.hosts[static_cast<size_t>(rank)]; }

int parent_of(const EngineOptions& options, int host) { return (host - 1) / options.fan_out; }

bool is_below(const EngineOptions& options, int host, int top) {
  while (host > top) host = parent_of(options, host);
  return host == top;
}

}  // namespace

std::vector<int> EngineOptions::local_ranks() const {
  std::vector<int> ranks;
  for (int each = 0; each < size; ++each) {
    if (hosts.empty() || host_of(*this, each) == host_of(*this, rank)) ranks.push_back(each);
  }
  return ranks;
}

std::vector<int> EngineOptions::relays_of(int each) const {
  std::vector<int> relays;
  for (int host = hosts.empty() ? 0 : host_of(*this, each); host > 0; host = parent_of(*this, host)) {
    const int leader = static_cast<int>(std::find(hosts.begin(), hosts.end(), host) - hosts.begin());
    if (leader != each) relays.push_back(leader);
  }
  return relays;
}

std::string EngineOptions::describe_remote(int remote) const {
  const size_t host = static_cast<size_t>(host_of(*this, remote));
  return "rank " + std::to_string(remote) + (host < host_names.size() ? " on host " + host_names[host] : "");
}

std::unique_ptr<Poller> make_poller(const EngineOptions& options) {
  if (!options.has_several_hosts()) return nullptr;
  auto poller = std::make_unique<Poller>();
  check(poller->open(options.bell));
  return poller;
}

std::unique_ptr<ControlPlane> make_tree_leader(const EngineOptions& options,
                                               const CoordinatorHostOptions& coordinator_host,
                                               const std::shared_ptr<HostMemory>& memory, Poller* poller) {
  const int mine = host_of(options, options.rank);
  std::unique_ptr<Channel> parent;
  std::vector<std::unique_ptr<Channel>> children;
  for (const hvl_connection& connection : options.connections) {
    if (connection.use != HVL_CONTROL) continue;
    const int peer_host = host_of(options, connection.rank);
    auto channel = std::make_unique<Channel>(duplicate(connection.fd), connection.send_key, connection.receive_key,
                                             options.describe_remote(connection.rank));
    check(poller->watch(channel->fd()));
    if (mine != 0 && peer_host == parent_of(options, mine)) {
      parent = std::move(channel);
    } else {
      children.push_back(std::move(channel));
    }
  }
  if ((mine == 0) != (parent == nullptr)) throw std::runtime_error("the tree of hosts is not connected");
  if (mine == 0) {
    std::vector<std::vector<int>> relays;
    for (int rank = 0; rank < options.size; ++rank) relays.push_back(options.relays_of(rank));
    return std::make_unique<TreeRoot>(memory, coordinator_host, options.local_ranks(), options.local_pids,
                                      std::move(relays), std::move(children));
  }
  RankSet below;
  for (int rank = 0; rank < options.size; ++rank) {
    if (is_below(options, host_of(options, rank), mine)) below.add(rank);
  }
  return std::make_unique<TreeNode>(memory, options.local_ranks(), std::move(below), std::move(parent),
                                    std::move(children));
}

std::unique_ptr<DataPlane> make_hosts_data_plane(const EngineOptions& options,
                                                 const std::shared_ptr<HostMemory>& memory, Waiter* waiter) {
  auto mesh = std::make_unique<Mesh>(options.size);
  for (const hvl_connection& connection : options.connections) {
    if (connection.use != HVL_DATA) continue;
    const std::string peer = options.describe_remote(connection.rank);
    std::unique_ptr<DataSeal> seal;
    if (options.seals_data) seal = std::make_unique<DataSeal>(connection.send_key, connection.receive_key, peer);
    mesh->add(connection.rank, duplicate(connection.fd), peer, std::move(seal));
  }
  return std::make_unique<HostsDataPlane>(memory, options.rank, options.local_rank, options.hosts, std::move(mesh),
                                          waiter);
}

}  // namespace hvl
