// The engine: negotiates the requests of this rank, and runs the log. This class is the face that the C API calls; it
// makes the parts, from the executor of collectives to the loop that runs them all.
#pragma once

#include <memory>

#include "engine/progress_loop.h"

namespace hvl {

class Engine {
 public:
  // `memory` is shared with the other ranks of this host. `handles` outlives the engine.
  Engine(const EngineOptions& options, std::shared_ptr<HostMemory> memory, HandleTable* handles);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Any thread. Takes effect with notify(). The request's operation, addresses and completion function are set; gives
  // it a handle unless it has a completion function.
  Status enqueue(std::unique_ptr<PendingRequest> request, int64_t* handle);
  // Any thread: where the caller's stream is, for requests on a GPU. See GpuAccess.
  Status request_gpu(int device, CudaStream stream, std::shared_ptr<const GpuRequest>* request);
  // Any thread: a send or a receive, which takes effect at once. Gives it a handle.
  Status post(MessageRequestPtr request, int64_t* handle);
  // Any thread. Call it after one or more calls of enqueue().
  void notify() { loop_.notify(); }
  // Any thread: waits until all handles are complete or unknown (HVL_OK), at most until the deadline (now_ns() time) or
  // a signal (HVL_IN_PROGRESS). Meanwhile no request is deferred to make larger batches.
  hvl_status wait(const int64_t* handles, size_t count, uint64_t deadline) {
    return loop_.wait(handles, count, deadline);
  }
  // Any thread: the caller asked for a result in vain, and will ask again.
  void request_flush() { loop_.request_flush(); }
  // Any thread: the handle of the request in flight under the operation's name; 0: there is none.
  int64_t handle_in_flight(Operation* operation) { return context_.queue.handle_in_flight(operation); }
  // Any thread: why requests are not accepted any more.
  Status job_status() const { return context_.queue.closed(); }
  // Ends the job on all ranks. Returns when the engine thread has ended.
  void shut_down();
  // In a child process that was forked, where no other function of it may be called.
  void close_in_child();

  const EngineOptions& options() const { return context_.options; }
  const EngineCounters& counters() const { return context_.counters; }
  const FlightRecorder& flight_recorder() const { return reporter_.flight_recorder(); }
  Timeline& timeline() { return reporter_.timeline(); }
  Fault& fault(hvl_fault_point point) { return point == HVL_FAULT_IN_DATA ? executor_.fault() : negotiator_.fault(); }
  // Nanoseconds that collectives have waited for other ranks.
  uint64_t waited_for_peers() const { return context_.waiter.waited(); }
  const std::shared_ptr<HostMemory>& memory() const { return context_.memory; }

 private:
  EngineContext context_;
  RequestTable requests_;
  CollectiveReporter reporter_;
  TuningObserver tuner_;
  GpuExecutor gpu_;
  Executor executor_;
  Negotiator negotiator_;
  PeerWatch watch_;
  Shutdown shutdown_;
  ProgressLoop loop_;  // last: its thread uses all of the above
};

}  // namespace hvl
