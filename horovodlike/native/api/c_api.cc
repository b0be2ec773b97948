// The functions of hvl.h that start, end and observe the engine.

#include "api/c_api.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/log.h"
#include "nccl/nccl_api.h"
#include "observe/stack_dump.h"
#include "transport/tcp/tcp_transport.h"

namespace hvl {
namespace {

thread_local std::string last_error;

// Guards current_engine; taken before any other lock of the engine. A thread that holds it must not call Python: a
// thread that holds the interpreter's lock may be waiting for it (bindings/torch/_ops/native_calls.c).
std::mutex engine_mutex;
std::shared_ptr<Engine> current_engine;
std::atomic<bool> is_child{false};

}  // namespace

// Never destroyed: a thread may still wait for a handle while the process exits.
HandleTable& handle_table() {
  static HandleTable* table = new HandleTable;
  return *table;
}

int32_t report(const Status& status) {
  if (!status.ok()) last_error = status.message();
  return status.code();
}

std::shared_ptr<Engine> engine() {
  std::lock_guard<std::mutex> lock(engine_mutex);
  return current_engine;
}

bool is_forked_child() { return is_child; }

Status not_initialized() {
  if (is_child) {
    return Status(HVL_NOT_INITIALIZED,
                  "init() was called in the parent process and its engine did not come along with fork(); call init() "
                  "in each process by itself, or start worker processes before init() or with the 'spawn' method");
  }
  return Status(HVL_NOT_INITIALIZED, "horovodlike has not been initialized; use hvd.init().");
}

namespace {

// Takes the locks that a child may use later, so that no other thread holds them while the process is forked.
void before_fork() {
  engine_mutex.lock();
  handle_table().lock();
}

void after_fork_in_parent() {
  handle_table().unlock();
  engine_mutex.unlock();
}

// The engine's thread exists in the parent only. The child closes its copies of the engine's connections, and forgets
// the engine without destroying it.
void after_fork_in_child() {
  if (current_engine != nullptr) {
    current_engine->close_in_child();
    new std::shared_ptr<Engine>(std::move(current_engine));  // never destroyed
    is_child = true;
  }
  after_fork_in_parent();
}

EngineOptions options_of(const hvl_config& config) {
  EngineOptions options;
  options.rank = config.rank;
  options.size = config.size;
  options.local_rank = config.local_rank;
  options.fusion_threshold = config.fusion_threshold;
  options.cycle_time = config.cycle_time;
  options.overlap = config.overlap != 0;
  options.cache_capacity = config.cache_capacity;
  options.stall_warning = config.stall_warning_time;
  options.stall_shutdown = config.stall_shutdown_time;
  options.processors = config.processors;
  options.flight_recorder_size = static_cast<size_t>(std::max(1, config.flight_recorder_size));
  if (config.flight_recorder_folder != nullptr) options.flight_recorder_folder = config.flight_recorder_folder;
  options.autotune.enabled = config.autotune != 0;
  options.autotune.fusion_threshold = config.autotune_fusion_threshold != 0;
  options.autotune.cycle_time = config.autotune_cycle_time != 0;
  options.autotune.warmup_samples = std::max(0, config.autotune_warmup_samples);
  options.autotune.steps_per_sample = std::max(1, config.autotune_steps_per_sample);
  if (config.autotune_log != nullptr) options.autotune.log = config.autotune_log;
  options.average_counts_joined = config.average_counts_joined != 0;
  options.hierarchical_adasum = config.hierarchical_adasum != 0;
  if (config.hosts != nullptr) {
    options.hosts.assign(config.hosts, config.hosts + config.size);
    const int num_hosts = 1 + *std::max_element(options.hosts.begin(), options.hosts.end());
    if (config.host_names != nullptr) options.host_names.assign(config.host_names, config.host_names + num_hosts);
    options.fan_out = config.fan_out;
    options.wakeup_fd = config.wakeup_fd;
    if (config.num_connections > 0) {
      options.transport =
          make_tcp_transport({config.connections, config.connections + config.num_connections}, config.seal_data != 0);
    }
  }
  options.gpu.operations = static_cast<GpuOperations>(config.gpu_operations);
  options.gpu.staging_bytes = static_cast<uint64_t>(config.gpu_staging_bytes);
  if (config.cuda_library != nullptr) options.gpu.cuda_library = config.cuda_library;
  if (config.nccl_library != nullptr) options.gpu.nccl_library = config.nccl_library;
  if (config.external != nullptr) options.external = ExternalOptions{*config.external};
  if (config.num_routes > 0) options.routes = Routes({config.routes, config.routes + config.num_routes});
  if (config.local_pids != nullptr) options.local_pids.assign(config.local_pids, config.local_pids + config.local_size);
  return options;
}

// True if each rule is one that the engine can follow.
bool are_consistent(const hvl_route* routes, int32_t num_routes, bool has_external) {
  return std::all_of(routes, routes + num_routes, [&](const hvl_route& route) {
    const bool is_own = route.transport == HVL_BY_ENGINE && (route.device == HVL_CPU || route.device == HVL_CUDA);
    const bool is_there = route.transport == HVL_STAGING || (route.transport == HVL_EXTERNAL && has_external);
    return route.below > 0 && (is_own || (is_there && implements(route.transport, route.kind, route.device)));
  });
}

// True if the values are in range, local ranks are in the order of ranks, and hosts in the order of their lowest ranks.
bool is_consistent(const hvl_config& config) {
  if (config.size < 1 || config.rank < 0 || config.rank >= config.size || config.slot_depth < 1 ||
      config.slot_bytes < 4096 || config.slot_bytes % static_cast<int64_t>(kAlignment) != 0 ||
      config.gpu_staging_bytes < 4096 || config.gpu_staging_bytes % static_cast<int64_t>(kAlignment) != 0 ||
      config.gpu_operations < HVL_GPU_AUTO || config.gpu_operations > HVL_GPU_STAGING || config.num_routes < 0 ||
      !are_consistent(config.routes, config.num_routes, config.external != nullptr || config.size == 1)) {
    return false;
  }
  int local_size = 0;
  int local_rank = 0;
  int num_hosts = 0;
  for (int rank = 0; rank < config.size; ++rank) {
    const int host = config.hosts != nullptr ? config.hosts[rank] : 0;
    if (host < 0 || host > num_hosts) return false;
    num_hosts = std::max(num_hosts, host + 1);
    const bool is_here = host == (config.hosts != nullptr ? config.hosts[config.rank] : 0);
    local_rank += is_here && rank < config.rank ? 1 : 0;
    local_size += is_here ? 1 : 0;
  }
  const bool is_connected = config.num_connections > 0 && config.connections != nullptr && config.fan_out > 0 &&
                            config.wakeup_fd >= 0 && config.wakeup_fds != nullptr;
  return local_size == config.local_size && local_rank == config.local_rank &&
         config.slot_bytes / local_size >= static_cast<int64_t>(kAlignment) && (num_hosts == 1 || is_connected);
}

Status start(const hvl_config& config) {
  if (config.abi_version != HVL_ABI_VERSION) {
    return Status(HVL_INVALID_ARGUMENT,
                  "the Python package and libhorovodlike.so are of different versions: reinstall");
  }
  if (!is_consistent(config)) {
    return Status(HVL_INVALID_ARGUMENT, "the engine's configuration contradicts itself");
  }
  std::lock_guard<std::mutex> lock(engine_mutex);
  if (current_engine != nullptr) return Status(HVL_INVALID_ARGUMENT, "the engine is running already");
  set_log_level(static_cast<LogLevel>(config.log_level));
  HostShape shape{config.local_size, config.slot_bytes, config.slot_depth};
  std::shared_ptr<HostMemory> memory;
  Status status;
  if (config.segment_fd >= 0) {
    status = HostMemory::map(config.segment_fd, shape, &memory);
  } else {
    memory = HostMemory::anonymous(shape);
    if (memory == nullptr) status = Status(HVL_RESOURCES, "no memory for the engine");
  }
  if (status.ok() && config.num_connections > 0) {
    status = memory->set_pipes(std::vector<int>(config.wakeup_fds, config.wakeup_fds + config.local_size));
  }
  if (!status.ok()) return status;
  static int once = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  (void)once;
  is_child = false;
  current_engine = std::make_shared<Engine>(options_of(config), std::move(memory), &handle_table());
  return Status();
}

}  // namespace
}  // namespace hvl

extern "C" {

int32_t hvl_implements(int32_t transport, int32_t kind, int32_t device) {
  return hvl::implements(transport, kind, device) ? 1 : 0;
}

int64_t hvl_segment_bytes(const hvl_config* config) {
  hvl::HostShape shape{config->local_size, config->slot_bytes, config->slot_depth};
  return static_cast<int64_t>(hvl::HostMemory::bytes_needed(shape));
}

int32_t hvl_init(const hvl_config* config) {
  return hvl::guarded([&] { return hvl::start(*config); });
}

int32_t hvl_shutdown(const char* reason) {
  return hvl::guarded([&] {
    std::shared_ptr<hvl::Engine> ending;
    {
      std::lock_guard<std::mutex> lock(hvl::engine_mutex);
      ending = std::move(hvl::current_engine);
      hvl::current_engine = nullptr;
    }
    if (ending != nullptr) ending->shut_down(reason);
    return hvl::Status();
  });
}

int32_t hvl_is_initialized(void) { return hvl::engine() != nullptr ? 1 : 0; }

int32_t hvl_job_status(void) {
  return hvl::guarded([] {
    std::shared_ptr<hvl::Engine> running = hvl::engine();
    return running == nullptr ? hvl::not_initialized() : running->job_status();
  });
}

int64_t hvl_await_stack_request(void) {
  std::shared_ptr<hvl::HostMemory> memory;
  int local_rank = 0;
  if (std::shared_ptr<hvl::Engine> running = hvl::engine()) {  // released before waiting
    memory = running->memory();
    local_rank = running->options().local_rank;
  }
  return memory != nullptr ? hvl::await_question(memory.get(), local_rank) : 0;
}

void hvl_answer_stack_request(int64_t request, const char* text) {
  std::shared_ptr<hvl::Engine> running = hvl::engine();
  if (running == nullptr) return;
  hvl::answer(running->memory().get(), running->options().local_rank, static_cast<uint32_t>(request), text);
}

const char* hvl_last_error(void) { return hvl::last_error.c_str(); }

void hvl_get_counters(hvl_counters* counters) {
  memset(counters, 0, sizeof *counters);
  std::shared_ptr<hvl::Engine> running = hvl::engine();
  if (running == nullptr) return;
  hvl::EngineCounters& counted = running->counters();
  const hvl::HostShape& shape = running->memory()->shape();
  counters->batches = counted.batches.load();
  counters->requests = counted.requests.load();
  counters->bytes = counted.bytes.load();
  counters->negotiated_in_full = counted.negotiated_in_full.load();
  counters->ranks = running->options().size;
  counters->executed = counted.executed.load();
  counters->negotiation_ns = counted.negotiation_time.load();
  counters->execution_ns = counted.execution_time.load();
  const hvl::TimeShares::Sums spent = counted.time.read(hvl::now_ns());
  counters->waiting_ns = spent.waiting;
  counters->communicating_ns = spent.communicating;
  counters->peer_wait_ns = static_cast<int64_t>(running->waited_for_peers());
  counters->blocked_ns = counted.blocked_time.load();
  const hvl::RankBlock& block = running->memory()->rank(running->options().local_rank);
  counters->in_flight = std::max<int64_t>(counted.time.in_flight(), block.waits.load());
  counters->bytes_by_shared_memory = counted.carried_bytes[HVL_SHARED_MEMORY].load();
  counters->bytes_by_tcp = counted.carried_bytes[HVL_TCP].load();
  counters->bytes_by_external = counted.carried_bytes[HVL_EXTERNAL].load();
  counters->bytes_by_nccl = counted.carried_bytes[HVL_NCCL].load();
  counters->bytes_by_staging = counted.carried_bytes[HVL_STAGING].load();
  counters->segment_bytes = static_cast<int64_t>(hvl::HostMemory::bytes_needed(shape)) / shape.ranks;
}

void hvl_get_straggler_stats(hvl_straggler_stats* stats, int32_t count) {
  std::fill_n(stats, count, hvl_straggler_stats{});
  std::shared_ptr<hvl::Engine> running = hvl::engine();
  if (running == nullptr) return;
  const std::vector<int> ranks = running->options().local_ranks();
  for (size_t local_rank = 0; local_rank < ranks.size(); ++local_rank) {
    if (ranks[local_rank] >= count) break;
    const hvl::RankBlock& block = running->memory()->rank(static_cast<int>(local_rank));
    stats[ranks[local_rank]] = {block.times_late.load(), static_cast<int64_t>(block.waited_for.load())};
  }
}

char* hvl_get_collective_records(void) {
  std::shared_ptr<hvl::Engine> running = hvl::engine();
  return running != nullptr ? strdup(hvl::to_json(running->flight_recorder().read()).c_str()) : nullptr;
}

char* hvl_sample_collectives(uint64_t* after, int32_t most) {
  std::shared_ptr<hvl::Engine> running = hvl::engine();
  if (running == nullptr || most < 1) return nullptr;
  const auto records = running->flight_recorder().sample(after, static_cast<size_t>(most));
  return strdup(hvl::to_json(records, hvl::EpochClock(0)).c_str());
}

int32_t hvl_start_timeline(const char* path, int32_t mark_cycles) {
  return hvl::guarded([&] {
    std::shared_ptr<hvl::Engine> running = hvl::engine();
    return running != nullptr ? running->timeline().start(path, mark_cycles != 0) : hvl::not_initialized();
  });
}

void hvl_stop_timeline(void) {
  if (std::shared_ptr<hvl::Engine> running = hvl::engine()) running->timeline().stop();
}

int32_t hvl_start_profile_timeline(const char* path) {
  return hvl::guarded([&] {
    std::shared_ptr<hvl::Engine> running = hvl::engine();
    return running != nullptr ? running->profile_timeline().start(path, false) : hvl::not_initialized();
  });
}

void hvl_stop_profile_timeline(void) {
  if (std::shared_ptr<hvl::Engine> running = hvl::engine()) running->profile_timeline().stop();
}

int32_t hvl_arm_fault(int32_t point, int32_t fault, double amount) {
  return hvl::guarded([&] {
    std::shared_ptr<hvl::Engine> running = hvl::engine();
    if (running == nullptr) return hvl::not_initialized();
    hvl::FaultAction trigger = hvl::make_trigger(static_cast<hvl_fault>(fault), amount);
    if (trigger == nullptr || (point != HVL_FAULT_IN_NEGOTIATION && point != HVL_FAULT_IN_DATA)) {
      return hvl::Status(HVL_INVALID_ARGUMENT, "there is no such fault");
    }
    running->fault(static_cast<hvl_fault_point>(point)).arm(std::move(trigger));
    return hvl::Status();
  });
}

int32_t hvl_cut_connections(void) {
  return hvl::guarded([] {
    hvl::cut_connections();
    return hvl::Status();
  });
}

int32_t hvl_find_gpu_libraries(const char* cuda_library, const char* nccl_library, int32_t counts_gpus,
                               hvl_gpu_libraries* found) {
  return hvl::guarded([&] {
    *found = hvl::find_gpu_libraries(cuda_library != nullptr ? cuda_library : "",
                                     nccl_library != nullptr ? nccl_library : "", counts_gpus != 0);
    return hvl::Status();
  });
}

const char* hvl_version(void) { return HVL_VERSION; }

}  // extern "C"
