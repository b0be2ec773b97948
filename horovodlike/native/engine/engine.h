// The engine: negotiates what this rank has ready, and runs the log.
//
// One thread at a time does this work: who holds the engine lock. A thread that waits for a result takes it if it is
// free, so that no thread has to wake another one and be woken by it. Otherwise the engine's own thread does the work,
// and goes on with what a thread leaves undone that is interrupted by a signal or has no time left.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "collective/adasum.h"
#include "collective/data_plane.h"
#include "collective/external_data_plane.h"
#include "control/control_plane.h"
#include "nccl/nccl_data_plane.h"
#include "observe/fault_injection.h"
#include "observe/flight_recorder.h"
#include "observe/timeline.h"
#include "queue/handle_table.h"
#include "queue/tensor_queue.h"
#include "sync/waiter.h"
#include "tune/autotuner.h"

namespace hvl {

// How often it is looked whether the other ranks live, while requests are in flight.
constexpr uint64_t kWatchInterval = 20 * kMillisecond;

struct EngineOptions {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int processors = 1;           // that this host's ranks may use, all together
  std::vector<int> local_pids;  // empty: the ranks are threads of one process
  int64_t fusion_threshold = 128 << 20;
  double cycle_time = 0;
  bool overlap = true;
  int cache_capacity = 1024;
  double stall_warning = 60;
  double stall_shutdown = 0;
  uint64_t leave_timeout = kLeaveTimeout;  // how long a rank that shuts down waits for what does not get on
  size_t flight_recorder_size = 256;
  std::string flight_recorder_folder;  // where it is written when the job breaks; empty: nowhere
  AutotuneOptions autotune;
  bool average_counts_joined = false;  // Average divides by the size of the process set, not by those that take part
  bool hierarchical_adasum = false;    // Adasum combines the averages of hosts, not what the ranks have
  std::optional<ExternalOptions> external;  // what moves the data in place of the engine's own transports
  GpuOptions gpu;
  // Of jobs of several hosts, as in hvl_config; descriptors are duplicated. `hosts` by rank, empty: all have the same.
  std::vector<int> hosts;
  std::vector<std::string> host_names;
  int fan_out = 16;
  std::vector<hvl_connection> connections;
  int bell = -1;
  bool seals_data = false;  // between hosts

  bool has_several_hosts() const { return !connections.empty(); }
  std::vector<int> local_ranks() const;         // the ranks of this host, ascending
  std::vector<int> relays_of(int rank) const;   // who passes on what it and the coordinator say, from it upwards
  std::string describe_remote(int rank) const;  // "rank 4 on host b"
};

struct EngineCounters {
  std::atomic<int64_t> batches{0};
  std::atomic<int64_t> requests{0};
  std::atomic<int64_t> executed{0};          // requests that were part of a batch
  std::atomic<int64_t> negotiation_time{0};  // nanoseconds from enqueue to the batch's begin, of all of these
  std::atomic<int64_t> execution_time{0};    // nanoseconds, of all batches
  std::atomic<int64_t> bytes{0};
  std::atomic<int64_t> negotiated_in_full{0};
};

class Engine {
 public:
  // `memory` is shared with the other ranks of this host. `handles` outlives the engine.
  Engine(const EngineOptions& options, std::shared_ptr<HostMemory> memory, HandleTable* handles);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Any thread. Takes effect with notify(). The entry's operation, addresses and completion function are set; gives it
  // a handle unless it has a completion function.
  Status enqueue(std::unique_ptr<PendingRequest> entry, int64_t* handle);
  // Any thread: where the caller's stream is, for the entries of requests on a GPU. See GpuAccess.
  Status request_gpu(int device, CudaStream stream, std::shared_ptr<const GpuRequest>* request) {
    const Status status = job_status();  // the device of a job that is broken may fail, too
    return status.ok() ? gpu_access_.request(device, stream, request) : status;
  }
  // Any thread. Call it after one or more calls of enqueue().
  void notify();
  // Any thread: waits until all handles are complete or unknown (HVL_OK), at most until the deadline (now_ns() time) or
  // a signal (HVL_IN_PROGRESS). Meanwhile nothing is held back to make larger batches.
  hvl_status wait(const int64_t* handles, size_t count, uint64_t deadline);
  // Any thread: somebody looked for a result in vain, and will look again.
  void request_flush();
  // Any thread: the handle of the request in flight under the operation's name; 0: there is none.
  int64_t handle_in_flight(Operation* operation) { return queue_.handle_in_flight(operation); }
  // Any thread: why requests are not accepted any more.
  Status job_status() const { return queue_.closed(); }
  // Ends the job on all ranks. Returns when the engine thread has ended.
  void shut_down();
  // In a child process that was forked, where nothing else of it may be called.
  void close_in_child() {
    control_->close_in_child();
    data_plane_->close_in_child();
  }

  const EngineOptions& options() const { return options_; }
  const EngineCounters& counters() const { return counters_; }
  const FlightRecorder& flights() const { return collective_records_; }
  Timeline& timeline() { return timeline_; }
  Fault& fault(hvl_fault_point point) { return point == HVL_FAULT_IN_DATA ? data_fault_ : negotiation_fault_; }
  // Nanoseconds that collectives have waited for other ranks.
  uint64_t waited_for_peers() const { return waiter_.waited(); }
  const std::shared_ptr<HostMemory>& memory() const { return memory_; }

 private:
  // What an id of the log stands for.
  struct Known {
    Signature signature;
    std::vector<int64_t> varying;  // laid out as in Record
    size_t varying_per_rank = 0;
    std::shared_ptr<NamedTensor> tensor;  // null: this rank has never asked for it

    const int64_t* varying_of(int rank) const { return varying.data() + static_cast<size_t>(rank) * varying_per_rank; }
  };

  // Any thread.
  Doorbell& doorbell() const { return memory_->rank(options_.local_rank).doorbell; }
  bool somebody_waits() const { return memory_->rank(options_.local_rank).waits.load() > 0; }
  bool is_wanted() const;
  // The engine's own thread.
  void run();

  // All that follows is for who holds the engine lock.
  void work(WaitingParty worker, const std::function<bool()>& enough, uint64_t deadline) noexcept;
  void give_back(std::unique_lock<std::mutex> lock);
  Status step(bool* progressed);
  bool has_work();
  uint32_t listening() const;  // to which reasons
  uint64_t idle_timeout() const;
  void request_peer_flush();
  uint64_t hold_limit() const;
  bool defers();
  Status submit(bool* progressed);
  Status check_process_set(int32_t process_set, const std::string& name) const;
  Status announce(NamedTensor* tensor, Message* ready);
  bool is_agreed(NamedTensor* tensor);
  Status apply(const Record& record);
  Status define(const Record& record);
  void adopt(TensorId id, Known* known);
  Status evict(const Record& record);
  Status forget(TensorId id, bool keeps_announcement);
  Status fail(const Record& record);
  Status execute(const Record& record);
  TeamPtr team_without(int32_t process_set, const std::vector<int32_t>& absent) const;
  Status find_tensors(const std::vector<TensorId>& ids);
  Status change_process_sets(const Signature& signature);
  Status complete_with(int64_t number);
  Status leave();

  // engine_collectives.cc: the collective under way.
  Status prepare(const Known& first);
  Reduction reduction_of(const Signature& signature, size_t tensor) const;
  Status allocate(size_t index, const TensorSignature& described, int64_t rows, char** data);
  void prepare_batch();
  std::vector<AveragedMembers> averaged_by_adasum(int32_t process_set) const;
  Status prepare_allgather(const Known& known);
  Status prepare_alltoall(const Known& known);
  Status prepare_exchange(const Known& known, size_t tensor);
  void prepare_reducescatter();
  Status go_on();
  Status go_on_with_batch();
  Status go_on_with_group();
  Status go_on_with_adasum();
  void complete(NamedTensor* tensor, Status status, std::vector<hvl_output> outputs = {});
  void end(const Status& reason);
  void gather_queued();

  // engine_life.cc: that the others live, and hear how the job ends.
  Status watch();
  Status check_coordinator(uint64_t now);
  bool is_on_coordinators_host() const {
    return options_.hosts.empty() || options_.hosts[static_cast<size_t>(options_.rank)] == 0;
  }
  std::string describe_coordinator() const;
  std::string describe_silence(uint64_t seconds) const;
  void check_other_hosts();
  void hear_why(Status* status);
  void flush_before_leaving();

  // engine_gpu.cc: tensors on GPUs.
  DataPlane* plane() const { return is_on_gpu_ ? gpu_plane_.get() : data_plane_.get(); }
  Status begin_on_gpu();
  std::string name_collective() const;
  std::string name_of_input(const char* input) const;  // null: the first tensor's
  Status hold_until_allocated(Status status);
  void* allocate_by_caller(const hvl_callbacks& callbacks, int32_t index, const hvl_output& output) const;
  Status prepare_adasum_on_gpu(const Known& first);
  GpuResultPtr result_on_gpu(const PendingRequest& entry, Status* status);
  Status watch_gpu();
  bool is_gpu_working() const { return gpu_plane_ != nullptr && gpu_plane_->is_working(); }
  void warn_of_busy_gpu();
  bool is_gpu_busy() const { return gpu_plane_ != nullptr && gpu_plane_->is_busy(); }
  void end_on_gpu(const Status& status);

  // engine_watch.cc: what it tells about itself.
  void note_begin();
  void note_end();
  void write_flights(const Status& reason) const;
  std::vector<const PendingRequest*> in_flight() const;
  Status with_what_is_in_flight(const Status& reason) const;

  // engine_tuning.cc: the values that are found out while the job runs.
  static std::unique_ptr<Autotuner> make_autotuner(const EngineOptions& options);  // null: none are
  void tune();

  const EngineOptions options_;
  const std::shared_ptr<HostMemory> memory_;
  HandleTable* const handles_;
  TensorQueue queue_;
  EngineCounters counters_;
  FlightRecorder collective_records_;  // written by who holds the engine lock
  Timeline timeline_;
  Fault negotiation_fault_;
  Fault data_fault_;
  GpuAccess gpu_access_;
  std::atomic<bool> stop_requested_{false};
  std::atomic<bool> flush_requested_{false};

  std::mutex engine_lock_;  // no lock is held when it is taken

  const std::unique_ptr<Poller> poller_;  // of jobs of several hosts

  // For who holds the engine lock.
  Waiter waiter_;
  std::unique_ptr<ControlPlane> control_;
  std::unique_ptr<DataPlane> data_plane_;
  std::unique_ptr<NcclDataPlane> gpu_plane_;  // from the first collective on a GPU on
  bool is_gpu_watched_ = false;               // the engine's thread wakes up to look after it
  std::unique_ptr<Autotuner> autotuner_;      // null: off, or done
  std::vector<uint64_t> tuned_tensors_;
  uint64_t cycle_time_;
  std::unordered_map<TensorId, Known> known_;
  std::unordered_map<std::string, std::shared_ptr<NamedTensor>> in_full_;  // announced without an id, by key
  std::vector<std::unique_ptr<PendingRequest>> new_entries_;
  Message ready_;
  std::map<int32_t, TeamPtr> process_sets_;  // by id; 0 has all ranks
  uint64_t num_executed_ = 0;                // collectives of the log, also those without this rank
  // The collective that is under way. Interrupted, it is gone on with by who has the engine lock next.
  bool is_running_ = false;
  bool has_failed_ = false;
  bool is_on_gpu_ = false;
  uint64_t begun_ = 0;
  TeamPtr team_;  // who takes part
  std::vector<NamedTensor*> tensors_;
  size_t num_completed_ = 0;  // of them
  Batch batch_;
  std::vector<uint64_t> entry_ends_;  // where in the batch's stream each of its requests ends
  std::vector<Gather> gathers_;       // of an allgather, one for each of the group's tensors
  std::vector<Scatter> scatters_;     // of a reducescatter, likewise
  std::vector<Exchange> exchanges_;   // of an alltoall, likewise
  Adasum adasum_;
  Batch host_batch_;                 // what Adasum works on if the tensors are on a GPU
  std::vector<hvl_output> outputs_;  // that the engine has allocated for it
  size_t num_done_ = 0;              // tensors of a group
  size_t num_in_flight_ = 0;
  uint64_t leaving_since_ = 0;  // when the log ended; 0: it has not
  std::string why_it_ended_;    // then
  bool warned_of_gpu_ = false;
  bool stop_announced_ = false;
  uint64_t stop_announced_at_ = 0;
  bool ended_ = false;
  uint64_t last_watch_ = 0;
  uint32_t inquiries_ = 0;           // of HostHeader, when last looked at
  uint64_t last_inquiry_ = 0;        // when they were first seen to be so many
  uint64_t last_record_ = now_ns();  // when the log last said something
  uint64_t held_since_ = 0;          // when requests began to be held back; 0: none are
  uint64_t held_limit_ = 0;          // and for how long they were to be
  uint64_t waiting_since_ = 0;       // when a thread was first seen to wait while nothing happened; 0: none does
  uint64_t next_nudge_ = 0;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace hvl
