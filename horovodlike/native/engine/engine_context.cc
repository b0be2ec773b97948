#include "engine/engine_context.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <utility>

#include "collective/hosts/hosts_data_plane.h"
#include "collective/loopback.h"
#include "collective/shm/shm_data_plane.h"
#include "control/shm_control.h"
#include "control/tree_control.h"

namespace hvl {

namespace {

std::atomic<uint64_t> engines_started{0};

WaiterOptions waiter_options(const EngineContext& context) {
  const EngineOptions& options = context.options;
  WaiterOptions waiter;
  waiter.local_rank = options.local_rank;
  waiter.ranks = options.local_ranks();
  waiter.poller = context.poller.get();
  waiter.check_other_hosts = [&context] { context.check_other_hosts(); };
  waiter.pids = options.local_pids;
  waiter.processors = options.processors;
  waiter.stall_warning = options.stall_warning;
  waiter.stall_shutdown = options.stall_shutdown;
  waiter.leaving = &context.stop_requested;
  waiter.leave_timeout = options.leave_timeout;
  // Before the rest of a batch waits, wakes the threads whose results are complete.
  waiter.before_sleep = std::bind(&HandleTable::wake_waiters, context.handles);
  return waiter;
}

MessengerOptions messenger_options(const EngineContext& context) {
  const EngineOptions& options = context.options;
  MessengerOptions messenger;
  messenger.rank = options.rank;
  messenger.size = options.size;
  messenger.local_rank = options.local_rank;
  messenger.local_ranks = options.local_ranks();
  messenger.local_pids = options.local_pids;
  messenger.describe = [&context](int rank) { return context.describe(rank); };
  messenger.memory = context.memory;
  messenger.transport = options.transport;
  messenger.poller = context.poller.get();
  messenger.handles = context.handles;
  return messenger;
}

CoordinatorHostOptions coordinator_host_options(const EngineOptions& options) {
  CoordinatorHostOptions coordinator_host;
  coordinator_host.coordinator.size = options.size;
  coordinator_host.coordinator.fusion_threshold = options.fusion_threshold;
  coordinator_host.coordinator.cache_capacity = options.cache_capacity;
  coordinator_host.coordinator.routes = options.routes;
  coordinator_host.stall_warning = options.stall_warning;
  coordinator_host.stall_shutdown = options.stall_shutdown;
  return coordinator_host;
}

void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

bool is_below(const EngineOptions& options, int host, int top) {
  while (host > top) host = options.parent_of(host);
  return host == top;
}

// Makes the control plane of local rank 0 in a job of several hosts. Its connections wake `poller`.
std::unique_ptr<ControlPlane> make_tree_leader(const EngineOptions& options,
                                               const CoordinatorHostOptions& coordinator_host,
                                               const std::shared_ptr<HostMemory>& memory, Poller* poller) {
  const auto connect = [&](int host) {
    const int leader = options.leader_of(host);
    auto connection = options.transport->connect(leader, options.describe_remote(leader));
    check(poller->watch(connection->fd()));
    return connection;
  };
  const int mine = options.host_of(options.rank);
  std::vector<std::unique_ptr<Connection>> connections;
  if (mine > 0) connections.push_back(connect(options.parent_of(mine)));
  const int num_hosts = 1 + *std::max_element(options.hosts.begin(), options.hosts.end());
  for (int host = 1; host < num_hosts; ++host) {
    if (options.parent_of(host) == mine) connections.push_back(connect(host));
  }
  if (mine == 0) {
    return std::make_unique<TreeRoot>(memory, coordinator_host, options.local_ranks(), options.local_pids,
                                      std::move(connections));
  }
  RankSet below;
  for (int rank = 0; rank < options.size; ++rank) {
    if (is_below(options, options.host_of(rank), mine)) below.add(rank);
  }
  return std::make_unique<TreeNode>(memory, options.local_ranks(), options.local_pids, std::move(below),
                                    std::move(connections));
}

std::unique_ptr<ControlPlane> make_control(const EngineOptions& options, const std::shared_ptr<HostMemory>& memory,
                                           Poller* poller) {
  if (options.size == 1) return std::make_unique<LoopbackControlPlane>(coordinator_host_options(options));
  if (options.local_rank != 0) return std::make_unique<ShmWorker>(memory, options.local_rank);
  if (options.has_several_hosts()) return make_tree_leader(options, coordinator_host_options(options), memory, poller);
  return std::make_unique<ShmCoordinator>(memory, coordinator_host_options(options), options.local_pids);
}

// Returns null in a job of one host.
std::unique_ptr<Poller> make_poller(const EngineOptions& options) {
  if (!options.has_several_hosts()) return nullptr;
  auto poller = std::make_unique<Poller>();
  check(poller->open(options.wakeup_fd));
  return poller;
}

std::unique_ptr<DataPlane> make_external_data_plane(const EngineOptions& options, Waiter* waiter) {
  return std::make_unique<ExternalDataPlane>(*options.external, options.local_rank, waiter);
}

// Returns null if no route names it.
std::unique_ptr<DataPlane> make_routed_data_plane(const EngineOptions& options, Waiter* waiter) {
  const bool is_named = options.size > 1 && options.external && options.routes.name(HVL_EXTERNAL);
  return is_named ? make_external_data_plane(options, waiter) : nullptr;
}

std::unique_ptr<DataPlane> make_hosts_data_plane(const EngineOptions& options,
                                                 const std::shared_ptr<HostMemory>& memory, Waiter* waiter) {
  auto mesh = options.transport->make_mesh([&](int rank) { return options.describe_remote(rank); });
  return std::make_unique<HostsDataPlane>(memory, options.rank, options.local_rank, options.hosts, std::move(mesh),
                                          waiter);
}

}  // namespace

int EngineOptions::leader_of(int host) const {
  return static_cast<int>(std::find(hosts.begin(), hosts.end(), host) - hosts.begin());
}

std::vector<int> EngineOptions::local_ranks() const {
  std::vector<int> ranks;
  for (int each = 0; each < size; ++each) {
    if (host_of(each) == host_of(rank)) ranks.push_back(each);
  }
  return ranks;
}

std::vector<int> EngineOptions::relays_of(int of_rank) const {
  std::vector<int> relays;
  for (int host = host_of(of_rank); host > 0; host = parent_of(host)) {
    if (leader_of(host) != of_rank) relays.push_back(leader_of(host));
  }
  return relays;
}

std::string EngineOptions::describe_remote(int of_rank) const {
  const size_t host = static_cast<size_t>(host_of(of_rank));
  return "rank " + std::to_string(of_rank) + (host < host_names.size() ? " on host " + host_names[host] : "");
}

std::unique_ptr<DataPlane> make_data_plane(const EngineOptions& options, const std::shared_ptr<HostMemory>& memory,
                                           Waiter* waiter) {
  if (options.size == 1) return std::make_unique<LoopbackDataPlane>();
  if (options.external && !options.routes.name(HVL_EXTERNAL)) return make_external_data_plane(options, waiter);
  if (options.has_several_hosts()) return make_hosts_data_plane(options, memory, waiter);
  return std::make_unique<ShmDataPlane>(memory, options.local_rank, waiter);
}

EngineContext::EngineContext(const EngineOptions& engine_options, std::shared_ptr<HostMemory> host_memory,
                             HandleTable* handle_table)
    : options(engine_options),
      memory(std::move(host_memory)),
      handles(handle_table),
      queue(++engines_started, &own_block().queued),
      poller(make_poller(options)),
      waiter(memory, waiter_options(*this)),
      control(make_control(options, memory, poller.get())),
      data_plane(make_data_plane(options, memory, &waiter)),
      external_plane(make_routed_data_plane(options, &waiter)),
      messenger(messenger_options(*this)) {}

std::string EngineContext::describe(int rank) const {
  const std::vector<int> local_ranks = options.local_ranks();
  const auto found = std::find(local_ranks.begin(), local_ranks.end(), rank);
  return found != local_ranks.end() ? waiter.describe(static_cast<int>(found - local_ranks.begin()))
                                    : options.describe_remote(rank);
}

void EngineContext::check_other_hosts() const {
  const Status status = control->check_other_hosts();
  if (!status.ok()) memory->break_job(status.message());
}

}  // namespace hvl
