// The engine: negotiates the requests of this rank, and executes the log. The C API calls this class, which owns all
// parts of the engine.
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

  // Any thread. Queues a request, whose operation, addresses and callbacks are set; it takes effect with notify(). Sets
  // *handle to its handle, or to 0 if it has a completion function.
  Status enqueue(std::unique_ptr<PendingRequest> request, int64_t* handle);
  // Any thread: records the position of the caller's stream, for requests on a GPU. See GpuAccess::request().
  Status request_gpu(int device, CudaStream stream, std::shared_ptr<const GpuRequest>* request);
  // Any thread: begins a send or a receive at once, and returns its handle in *handle.
  Status post(MessageRequestPtr request, int64_t* handle);
  // Any thread. Call it after one or more calls of enqueue().
  void notify() { loop_.notify(); }
  // Any thread: waits until all handles are complete or unknown (HVL_OK), at most until the deadline (now_ns() time) or
  // a signal (HVL_IN_PROGRESS). Meanwhile no request is deferred to make larger batches.
  hvl_status wait(const int64_t* handles, size_t count, uint64_t deadline) {
    return loop_.wait(handles, count, deadline);
  }
  // Any thread: ends the deferral of requests. Called after a poll for a result that was not complete.
  void request_flush() { loop_.request_flush(); }
  // Any thread: the handle of the request in flight under the operation's name; 0: there is none.
  int64_t handle_in_flight(Operation* operation) { return context_.queue.handle_in_flight(operation); }
  // Any thread: ok while requests are accepted; else the reason why not.
  Status job_status() const { return context_.queue.closed(); }
  // Ends the job on all ranks; `reason` becomes part of the others' error. Returns when the engine thread has ended.
  void shut_down(const std::string& reason = "");
  // Closes the connections in a forked child process, where no other function of the engine may be called.
  void close_in_child();

  const EngineOptions& options() const { return context_.options; }
  EngineCounters& counters() { return context_.counters; }
  const EngineCounters& counters() const { return context_.counters; }
  const FlightRecorder& flight_recorder() const { return reporter_.flight_recorder(); }
  Timeline& timeline() { return reporter_.timeline(); }
  Timeline& profile_timeline() { return reporter_.profile_timeline(); }
  Fault& fault(hvl_fault_point point) { return point == HVL_FAULT_IN_DATA ? executor_.fault() : negotiator_.fault(); }
  // Nanoseconds that collectives have waited for other ranks, or for staged copies of the GPU.
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
