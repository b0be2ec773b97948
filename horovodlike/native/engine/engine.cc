#include "engine/engine.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/log.h"
#include "base/memory.h"
#include "collective/loopback.h"
#include "collective/shm/shm_data_plane.h"
#include "control/loopback_control.h"
#include "control/shm_control.h"
#include "engine/hosts_setup.h"
#include "observe/stack_dump.h"

namespace hvl {

namespace {

constexpr uint64_t kIdleInterval = 500 * kMillisecond;
constexpr int64_t kWorthSending = 1 << 20;  // bytes
constexpr uint64_t kMaxHold = 50 * kMillisecond;
constexpr uint64_t kFirstNudge = kMillisecond;

std::atomic<uint64_t> engines_started{0};

WaiterOptions waiter_options(const EngineOptions& options, const std::atomic<bool>* leaving, HandleTable* handles,
                             Poller* poller, std::function<void()> check_other_hosts) {
  WaiterOptions waiter;
  waiter.local_rank = options.local_rank;
  waiter.ranks = options.local_ranks();
  waiter.poller = poller;
  waiter.check_other_hosts = std::move(check_other_hosts);
  waiter.pids = options.local_pids;
  waiter.processors = options.processors;
  waiter.stall_warning = options.stall_warning;
  waiter.stall_shutdown = options.stall_shutdown;
  waiter.leaving = leaving;
  waiter.leave_timeout = options.leave_timeout;
  waiter.before_sleep = [handles] { handles->wake_waiters(); };  // of what is complete while the rest has to wait
  return waiter;
}

CoordinatorHostOptions coordinator_host_options(const EngineOptions& options) {
  CoordinatorHostOptions coordinator_host;
  coordinator_host.coordinator.size = options.size;
  coordinator_host.coordinator.fusion_threshold = options.fusion_threshold;
  coordinator_host.coordinator.cache_capacity = options.cache_capacity;
  coordinator_host.stall_warning = options.stall_warning;
  coordinator_host.stall_shutdown = options.stall_shutdown;
  return coordinator_host;
}

std::unique_ptr<ControlPlane> make_control(const EngineOptions& options, const std::shared_ptr<HostMemory>& memory,
                                           Poller* poller) {
  if (options.size == 1) return std::make_unique<LoopbackControlPlane>(coordinator_host_options(options));
  if (options.local_rank != 0) return std::make_unique<ShmWorker>(memory, options.local_rank);
  if (options.has_several_hosts()) return make_tree_leader(options, coordinator_host_options(options), memory, poller);
  return std::make_unique<ShmCoordinator>(memory, coordinator_host_options(options), options.local_pids);
}

std::unique_ptr<DataPlane> make_data_plane(const EngineOptions& options, const std::shared_ptr<HostMemory>& memory,
                                           Waiter* waiter) {
  if (options.size == 1) return std::make_unique<LoopbackDataPlane>();
  if (options.external) return std::make_unique<ExternalDataPlane>(*options.external, options.local_rank, waiter);
  if (options.has_several_hosts()) return make_hosts_data_plane(options, memory, waiter);
  return std::make_unique<ShmDataPlane>(memory, options.local_rank, waiter);
}

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Engine::Engine(const EngineOptions& options, std::shared_ptr<HostMemory> memory, HandleTable* handles)
    : options_(options),
      memory_(std::move(memory)),
      handles_(handles),
      queue_(++engines_started, &memory_->rank(options.local_rank).queued),
      collective_records_(options.flight_recorder_size),
      timeline_(options.rank),
      gpu_access_(options.gpu),
      poller_(make_poller(options_)),
      waiter_(memory_,
              waiter_options(options_, &stop_requested_, handles, poller_.get(), [this] { check_other_hosts(); })),
      control_(make_control(options_, memory_, poller_.get())),
      data_plane_(make_data_plane(options_, memory_, &waiter_)),
      autotuner_(make_autotuner(options_)),
      cycle_time_(to_ns(options_.cycle_time)) {
  std::vector<int> all_ranks(static_cast<size_t>(options_.size));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  process_sets_[0] = std::make_shared<Team>(std::move(all_ranks), options_.rank);
  SignalsBlocked while_the_thread_is_made;  // it inherits that: signals are for the framework's threads
  thread_ = std::thread([this] { run(); });
}

Engine::~Engine() { shut_down(); }

void Engine::shut_down() {
  stop_requested_.store(true);
  stop_answering(memory_.get(), options_.local_rank);
  memory_->notify(options_.local_rank, kWakeNews);
  if (thread_.joinable()) {
    thread_.join();
    if (poller_ != nullptr && memory_->is_broken()) {  // the other hosts are to hear of it
      const std::lock_guard<std::mutex> lock(engine_lock_);
      const std::function<bool()> never = [] { return false; };
      waiter_.take_turn(WaitingParty::kEngineThread, UINT64_MAX, &never);
      flush_before_leaving();
    }
  }
  timeline_.stop();
}

Status Engine::enqueue(std::unique_ptr<PendingRequest> entry, int64_t* handle) {
  const bool with_handle = entry->callbacks.done == nullptr;
  // Whoever is called back cannot show that he waits. And where requests are held back for want of processors, those on
  // a GPU are not: it computes them.
  const bool is_urgent = !with_handle || (entry->gpu != nullptr && !options_.overlap);
  entry->enqueued_at = now_ns();
  if (entry->is_copied) {
    const size_t num_bytes = static_cast<size_t>(entry->operation->total_bytes);
    char* copy;
    entry->handle = handles_->create_with_copy(num_bytes, &copy);
    memcpy(copy, entry->memory.input, num_bytes);
    entry->memory = {copy, copy};
  } else {
    entry->handle = with_handle ? handles_->create() : 0;
  }
  *handle = entry->handle;
  Status status = queue_.push(std::move(entry));
  if (!status.ok()) {
    if (with_handle) handles_->discard(*handle);
    *handle = 0;
    return status;
  }
  if (is_urgent) flush_requested_.store(true);
  return status;
}

void Engine::notify() {
  // What is held back is sent when this rank waits, when another one that waits asks for it, or in kMaxHold at last.
  if (options_.overlap || is_wanted()) memory_->notify(options_.local_rank, kWakeNews);
}

void Engine::request_flush() {
  if (!flush_requested_.exchange(true)) memory_->notify(options_.local_rank, kWakeNews);
}

// What was interrupted, then what the log says. Where the engine may work while the framework computes, it leaves as
// soon as there is enough; elsewhere what is left would take the same processor.
Status Engine::step(bool* progressed) {
  if (leaving_since_ != 0) return leave();
  const size_t num_in_flight = num_in_flight_;
  Status status = submit(progressed);
  if (status.ok()) status = control_->pump(progressed);
  if (num_in_flight_ > num_in_flight && negotiation_fault_.is_armed()) negotiation_fault_.trigger();
  Record record;
  while (status.ok() && !ended_ && !waiter_.is_interrupted() && !(options_.overlap && waiter_.has_enough())) {
    bool found = true;
    if (is_running_) {
      status = go_on();
    } else {
      status = control_->next(&record, &found);
      if (!status.ok() || !found) break;
      last_record_ = now_ns();
      status = apply(record);
    }
    *progressed = true;
    handles_->wake_waiters();
    if (is_running_) break;  // it was interrupted
  }
  return status;
}

bool Engine::has_work() {
  if (leaving_since_ != 0) return memory_->is_broken();
  const bool queue_has_work = held_since_ != 0 ? is_wanted() || hold_limit() < held_limit_ : !queue_.empty();
  return queue_has_work || is_running_ || control_->has_news() || memory_->is_broken() ||
         (stop_requested_.load() && !stop_announced_);
}

uint32_t Engine::listening() const {
  // With nothing in flight here, what the others have ready can be run only if this rank is no member or has joined.
  const bool may_run = num_in_flight_ > 0 || process_sets_.size() > 1;
  return kWakeNews | (may_run ? kWakeReady : 0u) | (control_->is_flushed() ? 0u : kWakeRoom);
}

uint64_t Engine::idle_timeout() const {
  if (leaving_since_ != 0) return kWatchInterval;
  uint64_t timeout = num_in_flight_ > 0 || is_gpu_busy() ? kWatchInterval : kIdleInterval;
  if (!options_.overlap) timeout = std::min(timeout, kMaxHold);  // no notification comes for deferred requests
  const uint64_t now = now_ns();
  auto be_there_at = [&](uint64_t time) { timeout = std::min(timeout, time - std::min(now, time)); };
  if (held_since_ != 0) be_there_at(held_since_ + held_limit_);
  if (waiting_since_ != 0) be_there_at(next_nudge_);
  be_there_at(control_->next_deadline());
  if (poller_ != nullptr && !control_->is_flushed()) timeout = std::min(timeout, kMillisecond);
  return timeout;
}

// While somebody waits here and nothing happens, those that hold back requests are asked to send them: what is waited
// for may be among them. Soon, but not at once, as they will most often come to wait themselves.
void Engine::request_peer_flush() {
  const uint64_t now = now_ns();
  if (!somebody_waits()) {
    waiting_since_ = 0;
  } else if (waiting_since_ == 0) {
    waiting_since_ = now;
    next_nudge_ = now + kFirstNudge;
  } else if (now >= next_nudge_) {
    next_nudge_ = now + std::min(now - waiting_since_, kMaxHold);
    memory_->notify_holders(options_.local_rank);
  }
}

// Somebody here looks at the results, or there is so much that it is time to start.
bool Engine::is_wanted() const {
  return somebody_waits() || flush_requested_.load() || stop_requested_.load() ||
         (options_.overlap && queue_.queued_bytes() >= kWorthSending);
}

// How long requests that are not wanted are held back. Each start costs the computing threads changes of context and
// their caches, and soon there will be more to send; where they have no processor to spare it is best to start when
// they have nothing left to compute, which shows by one of them waiting.
uint64_t Engine::hold_limit() const {
  if (options_.overlap) return cycle_time_;
  return memory_->another_waits(options_.local_rank) ? 0 : kMaxHold;
}

bool Engine::defers() {
  held_limit_ = hold_limit();
  bool hold = held_limit_ > 0 && !is_wanted();
  if (hold && held_since_ == 0) held_since_ = now_ns();
  hold = hold && now_ns() - held_since_ < held_limit_;
  if (!hold) held_since_ = 0;
  return hold;
}

Status Engine::submit(bool* progressed) {
  if (stop_requested_.load() && !stop_announced_) {
    stop_announced_ = true;
    stop_announced_at_ = now_ns();
    *progressed = true;
    Message message;
    message.type = Message::Type::kShutdown;
    Status status = control_->send(message);
    if (!status.ok()) return status;
  }
  if (queue_.empty() || defers()) return Status();
  flush_requested_.store(false);
  queue_.take(&new_entries_);
  *progressed = true;
  Status status;
  ready_.ids.clear();
  for (std::unique_ptr<PendingRequest>& entry : new_entries_) {
    NamedTensor* tensor = entry->tensor.get();
    tensor->entry = std::move(entry);
    ++num_in_flight_;
    const Signature& signature = tensor->entry->signature();
    const Status valid = check_process_set(signature.process_set, signature.name);
    if (!valid.ok()) {
      tensor->announced_in_full = false;
      complete(tensor, valid);
      continue;
    }
    if (status.ok()) status = announce(tensor, &ready_);
    if (!status.ok()) in_full_[tensor->key] = tensor->entry->tensor;  // where end() finds it
  }
  new_entries_.clear();
  handles_->wake_waiters();  // of what is invalid
  if (status.ok() && !ready_.ids.empty()) status = control_->send(ready_);
  return status;
}

Status Engine::check_process_set(int32_t process_set, const std::string& name) const {
  const auto team = process_sets_.find(process_set);
  if (team == process_sets_.end()) {
    return Status(HVL_INVALID_ARGUMENT, "'" + name + "' is for process set " + std::to_string(process_set) +
                                            ", which does not exist (any more)");
  }
  if (team->second->is_member()) return Status();
  return Status(HVL_INVALID_ARGUMENT, "rank " + std::to_string(options_.rank) + " is not a member of process set " +
                                          std::to_string(process_set) + ", for which it has enqueued '" + name + "'");
}

Status Engine::announce(NamedTensor* tensor, Message* ready) {
  tensor->announced_in_full = !is_agreed(tensor);
  if (!tensor->announced_in_full) {
    ready->ids.push_back(tensor->id);
    return Status();
  }
  if (!ready->ids.empty()) {  // keep the order in which the framework enqueued
    Status status = control_->send(*ready);
    ready->ids.clear();
    if (!status.ok()) return status;
  }
  counters_.negotiated_in_full.fetch_add(1, std::memory_order_relaxed);
  in_full_[tensor->key] = tensor->entry->tensor;
  Message request;
  request.type = Message::Type::kRequest;
  request.signature = tensor->entry->signature();
  return control_->send(request);
}

bool Engine::is_agreed(NamedTensor* tensor) {
  const std::shared_ptr<Operation>& operation = tensor->entry->operation;
  if (tensor->id == NamedTensor::kNoId) return false;
  if (tensor->agreed == operation) return true;
  const Known& known = known_.at(tensor->id);
  Signature expected = known.signature;
  put_varying(known.varying_of(options_.rank), known.varying_per_rank, &expected);
  if (expected != operation->signature) return false;
  tensor->agreed = operation;
  return true;
}

void Engine::complete(NamedTensor* tensor, Status status, std::vector<hvl_output> outputs) {
  std::unique_ptr<PendingRequest> entry = std::move(tensor->entry);
  GpuResultPtr on_gpu;
  if (entry->gpu != nullptr && status.ok()) on_gpu = result_on_gpu(*entry, &status);
  --num_in_flight_;
  counters_.requests.fetch_add(1, std::memory_order_relaxed);
  counters_.bytes.fetch_add(entry->operation->total_bytes, std::memory_order_relaxed);
  if (tensor->announced_in_full) in_full_.erase(tensor->key);
  queue_.finish(*entry);  // first: who sees the result may use the name again
  const hvl_callbacks& callbacks = entry->callbacks;
  if (callbacks.done != nullptr) {
    for (hvl_output& output : outputs) free(output.data);  // nobody can ask for them
    callbacks.done(callbacks.context, status.code(), status.message().c_str());
  } else {
    handles_->complete(entry->handle, std::move(status), std::move(outputs), std::move(on_gpu));
  }
}

// What has not been announced, first what submit() left behind if it was interrupted.
void Engine::gather_queued() {
  do {
    for (std::unique_ptr<PendingRequest>& entry : new_entries_) {
      if (entry == nullptr) continue;
      NamedTensor* tensor = entry->tensor.get();
      tensor->entry = std::move(entry);
      ++num_in_flight_;
      in_full_[tensor->key] = tensor->entry->tensor;
    }
    new_entries_.clear();
    queue_.take(&new_entries_);
  } while (!new_entries_.empty());
}

void Engine::end(const Status& reason) {
  ended_ = true;
  gather_queued();
  const Status status = with_what_is_in_flight(reason);
  if (status.code() == HVL_JOB_BROKEN) {
    write_flights(reason);
    if (options_.external) {
      const hvl_external& external = options_.external->functions;
      external.broken(external.context, reason.message().c_str());
    }
  }
  if (autotuner_ != nullptr) autotuner_->stop();
  queue_.close(status);
  end_on_gpu(status);
  gather_queued();  // what came before the queue was closed
  auto unknown = std::move(in_full_);
  in_full_.clear();
  for (auto& waiting : unknown) {
    if (waiting.second->entry != nullptr) complete(waiting.second.get(), status);
  }
  for (auto& known : known_) {
    NamedTensor* tensor = known.second.tensor.get();
    if (tensor == nullptr) continue;
    if (tensor->entry != nullptr) complete(tensor, status);
    tensor->agreed = nullptr;
  }
  is_running_ = false;
  for (hvl_output& output : outputs_) data_plane_->holds_memory() ? leak(output.data) : free(output.data);
  outputs_.clear();
  handles_->wake_waiters();
}

}  // namespace hvl
