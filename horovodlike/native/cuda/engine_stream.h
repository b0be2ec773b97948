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

// Polls `condition` for kLeaveTimeout at most. Returns whether it became true.
bool poll_until(const std::function<bool()>& condition);

// For the thread that holds the engine lock. Errors break the job.
class EngineStream {
 public:
  // `who`: this rank and its GPU.
  EngineStream(std::string who, std::shared_ptr<Gpu> gpu, Waiter* waiter)
      : who_(std::move(who)), gpu_(std::move(gpu)), waiter_(waiter) {}
  EngineStream(const EngineStream&) = delete;
  EngineStream& operator=(const EngineStream&) = delete;
  // Must be called before anything else.
  Status open();
  CudaStream get() const { return stream_; }
  const std::string& who() const { return who_; }
  // An error of the device or of NCCL breaks the job, and names its rank.
  Status broken(const Status& status) const;

  // A collective begins.
  void begin();
  // Sets the name of the collective for stall reports: "the allreduce of 'x'".
  void set_name(std::string name) { name_ = std::move(name); }
  // The device begins the work that follows only after the work that the request's stream had been given at its
  // enqueue, or until now: the latter is for memory that was allocated since.
  Status hold_until_ready(const GpuRequest& request);
  Status hold_until_now(const GpuRequest& request);
  // The stream has been given all work of the collective, or of one of its tensors. It may copy from `memory`.
  Status end(std::shared_ptr<PinnedMemory> memory);
  // The result of the collective since begin(): null if the device has nothing to do for it.
  const GpuResultPtr& result() const { return result_; }

  bool is_working() const { return !in_flight_.empty(); }
  // Finds what is done.
  Status check();
  // The ranks have already agreed on the work in flight, and NCCL does not detect most of the causes that stall a
  // device.
  Status check_stall();
  // The job is broken: results that are not there fail.
  void fail(const Status& why);
  // Returns whether the stream reached its end within kLeaveTimeout.
  bool drain() const;
  // After fail(). `has_ended`: the device does no more work of the stream.
  void let_go(bool has_ended);
  // Nothing else may be called afterwards. If it has not ended, its remaining work outlives this, and the memory that
  // it copies from is leaked.
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
  uint64_t progressed_at_ = 0;      // when the first of them became the first
  bool warned_ = false;             // that it makes no progress

  // The collective under way.
  std::string name_;
  std::vector<GpuEventPtr> ready_;  // of its requests, unless the one before waits for it, too
  GpuEventPtr last_ready_;
  GpuResultPtr result_;
};

}  // namespace hvl
