// The engine's stream on a GPU, and the collectives on it that are not done yet.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/gpu.h"
#include "sync/waiter.h"

namespace hvl {

// Polls until `condition` holds, for kLeaveTimeout at most. Returns false if it did not hold in time.
bool poll_until(const std::function<bool()>& condition);

// Only the thread that holds the engine lock may use it. Errors break the job.
class EngineStream {
 public:
  // `who`: the name of this rank and its GPU, for messages.
  EngineStream(std::string who, std::shared_ptr<Gpu> gpu, Waiter* waiter)
      : who_(std::move(who)), gpu_(std::move(gpu)), waiter_(waiter) {}
  EngineStream(const EngineStream&) = delete;
  EngineStream& operator=(const EngineStream&) = delete;
  // Must be called before anything else.
  Status open();
  CudaStream get() const { return stream_; }
  const std::string& who() const { return who_; }
  // Turns an error of the device or of NCCL into one that breaks the job and names this rank.
  Status broken(const Status& status) const;

  // Begins a collective: it has no result yet, and waits for no request.
  void begin();
  // Sets the name of the collective for stall reports: "the allreduce of 'x'".
  void set_name(std::string name) { name_ = std::move(name); }
  // The stream's next work waits for all work that the request's stream had been given at the enqueue, or has been
  // given until now. The latter is for memory that was allocated after the enqueue.
  Status hold_until_ready(const GpuRequest& request);
  Status hold_until_now(const GpuRequest& request);
  // Makes the result of the collective, or of one of its tensors, whose work has all been given to the stream. Keeps
  // `memory`, from which the work may copy, until the work is done.
  Status end(std::shared_ptr<PinnedMemory> memory);
  // The result of the collective that has begun last; null if the device has no work for it.
  const GpuResultPtr& result() const { return result_; }

  bool is_working() const { return !in_flight_.empty(); }
  // Removes collectives that are done from those in flight.
  Status check();
  // Warns once of work in flight that has stalled; returns an error when it has stalled for too long. No other check
  // finds it: its negotiation is over, and NCCL does not detect most causes of a stalled device.
  Status check_stall();
  // Called when the job is broken: fails the results of work that is not done.
  void fail(const Status& why);
  // Waits for kLeaveTimeout at most. True if the stream has reached its end, or has failed.
  bool drain() const;
  // Call it after fail(): ends the wait for results in flight. `has_ended`: the device does no more work of the stream.
  void let_go(bool has_ended);
  // Nothing else may be called afterwards. If the stream has not ended, its work outlives this object, and the memory
  // that the work copies from is leaked.
  void close(bool has_ended);

 private:
  struct InFlight {
    GpuResultPtr result;
    std::shared_ptr<PinnedMemory> memory;  // the device may still copy from it
    std::string name;
    std::vector<GpuEventPtr> ready;  // the events of its callers' streams that it waits for
  };

  Stall describe_stall() const;

  const std::string who_;
  const std::shared_ptr<Gpu> gpu_;
  Waiter* const waiter_;
  CudaStream stream_ = nullptr;
  std::deque<InFlight> in_flight_;  // in the order of the stream
  uint64_t progressed_at_ = 0;      // when the first of them became the first one in flight
  bool warned_ = false;             // a warning of no progress has been given

  // The collective under way.
  std::string name_;
  std::vector<GpuEventPtr> ready_;  // its requests' events, but not those that the stream waits for already
  GpuEventPtr last_ready_;
  GpuResultPtr result_;
};

}  // namespace hvl
