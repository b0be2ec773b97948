// The state that all parts of an engine share: its options and counters, the queue, the handles, the control plane, the
// data plane and the messenger.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/external_data_plane.h"
#include "control/control_plane.h"
#include "cuda/gpu_access.h"
#include "negotiate/coordinator.h"
#include "observe/time_shares.h"
#include "p2p/messenger.h"
#include "queue/handle_table.h"
#include "queue/tensor_queue.h"
#include "sync/waiter.h"
#include "transport/transport.h"
#include "tune/autotuner.h"

namespace hvl {

// The interval at which an engine checks that the other ranks are alive, while requests are in flight.
constexpr uint64_t kWatchInterval = 20 * kMillisecond;

struct EngineOptions {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int processors = 1;           // available to all ranks of this host together
  std::vector<int> local_pids;  // by local rank; empty: the ranks are threads of one process
  int64_t fusion_threshold = CoordinatorOptions().fusion_threshold;
  double cycle_time = 0;
  bool overlap = true;
  int cache_capacity = CoordinatorOptions().cache_capacity;
  double stall_warning = 60;
  double stall_shutdown = 0;
  uint64_t leave_timeout = kLeaveTimeout;  // how long a rank that shuts down waits without progress
  size_t flight_recorder_size = 256;
  std::string flight_recorder_folder;  // its file is written there when the job breaks; empty: no file
  AutotuneOptions autotune;
  bool average_counts_joined =
      false;  // Average divides by the size of the process set, not by the number of ranks that take part
  bool hierarchical_adasum = false;         // Adasum combines the averages of hosts, not the vectors of ranks
  std::optional<ExternalOptions> external;  // the library that moves the data in place of the engine's own transports
  Routes routes;                            // if they name HVL_EXTERNAL, it moves only the data of these operations
  GpuOptions gpu;
  // Set in jobs of several hosts; see hvl_config. In a job of one host `hosts` (by rank) is empty, `transport` null.
  std::vector<int> hosts;
  std::vector<std::string> host_names;
  int fan_out = 16;
  std::shared_ptr<Transport> transport;
  int wakeup_fd = -1;

  bool has_several_hosts() const { return transport != nullptr; }
  int host_of(int of_rank) const { return hosts.empty() ? 0 : hosts[static_cast<size_t>(of_rank)]; }
  int parent_of(int host) const { return (host - 1) / fan_out; }  // in the tree of hosts
  int leader_of(int host) const;                                  // the rank that is its local rank 0
  std::vector<int> local_ranks() const;                           // the ranks of this host, ascending
  std::vector<int> relays_of(int of_rank) const;   // the relays of its messages to the coordinator, in order
  std::string describe_remote(int of_rank) const;  // "rank 4 on host b"
};

struct EngineCounters {
  std::atomic<int64_t> batches{0};
  std::atomic<int64_t> requests{0};
  std::atomic<int64_t> executed{0};          // requests that were part of a batch
  std::atomic<int64_t> negotiation_time{0};  // nanoseconds from enqueue to the batch's start, summed over them
  std::atomic<int64_t> execution_time{0};    // nanoseconds, of all batches in total
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> negotiated_in_full{0};
  std::array<std::atomic<int64_t>, HVL_STAGING + 1> carried_bytes{};  // bytes of tensors in batches, by hvl_transport
  std::atomic<int64_t> blocked_time{0};  // nanoseconds in which callers waited, summed over their threads: see hvl.h
  TimeShares time;
};

struct EngineContext {
  // `host_memory` is shared with the other ranks of this host. `handle_table` outlives the engine.
  EngineContext(const EngineOptions& engine_options, std::shared_ptr<HostMemory> host_memory,
                HandleTable* handle_table);

  RankBlock& own_block() const { return memory->rank(options.local_rank); }
  void notify_news() const { memory->notify(options.local_rank, kWakeNews); }
  std::string describe_self() const { return waiter.describe(options.local_rank); }
  // Returns the name of any rank, for texts to the user.
  std::string describe(int rank) const;
  // Returns the data plane for a tensor on the CPU.
  DataPlane* plane_of(hvl_transport transport) const {
    return transport == HVL_EXTERNAL && external_plane != nullptr ? external_plane.get() : data_plane.get();
  }
  // True if something other than this process's threads may still write to the outputs of a failed collective.
  bool holds_memory() const {
    return data_plane->holds_memory() || (external_plane != nullptr && external_plane->holds_memory());
  }
  // Breaks the job on this host if another host has broken it, or a control connection is lost.
  void check_other_hosts() const;

  const EngineOptions options;
  const std::shared_ptr<HostMemory> memory;
  HandleTable* const handles;
  TensorQueue queue;
  EngineCounters counters;
  std::atomic<bool> stop_requested{false};
  std::string stop_reason;  // for the other ranks; set before stop_requested

  const std::unique_ptr<Poller> poller;  // null in a job of one host

  // Only the holder of the engine lock uses the rest.
  Waiter waiter;
  const std::unique_ptr<ControlPlane> control;
  const std::unique_ptr<DataPlane> data_plane;      // for tensors on the CPU
  const std::unique_ptr<DataPlane> external_plane;  // for tensors that the routes send there; null: none
  Messenger messenger;                              // some functions are for any thread
};

// Makes the data plane for tensors on the CPU that no route sends elsewhere. Throws std::runtime_error on a system
// error, like EngineContext().
std::unique_ptr<DataPlane> make_data_plane(const EngineOptions& options, const std::shared_ptr<HostMemory>& memory,
                                           Waiter* waiter);

}  // namespace hvl
