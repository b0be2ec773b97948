// One GPU of this process: its context, events, and host memory that it can copy from and to.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "cuda/cuda_api.h"

namespace hvl {

class Gpu;

// A point in the work of a stream. The last owner returns the event to its GPU's pool, even if the stream has not
// reached it: other streams that wait for this point still wait for it when the event is recorded again.
class GpuEvent {
 public:
  GpuEvent(std::shared_ptr<Gpu> gpu, CudaEvent event) : gpu_(std::move(gpu)), event_(event) {}
  ~GpuEvent();
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;

  // Makes a stream of the same GPU wait for this point before any work that it is given later. Any thread; does not
  // block.
  Status hold_up(CudaStream stream) const;
  // The same for a stream that is not the engine's. HVL_INVALID_ARGUMENT: it is being captured into a graph.
  Status hold_up_callers(CudaStream stream) const;
  // Sets *done if the device has reached this point. An error is one of the device, from any work that has run on it.
  Status query(bool* done) const;
  // The time since which every query of an event of this GPU has failed (now_ns() clock); 0: the last one did not fail.
  uint64_t failing_since() const;

 private:
  Status ask(bool* done) const;

  const std::shared_ptr<Gpu> gpu_;
  const CudaEvent event_;
};

using GpuEventPtr = std::shared_ptr<const GpuEvent>;

// The point in the caller's stream at which a request was enqueued: its collective begins after the work that `stream`
// had been given before.
struct GpuRequest {
  GpuEventPtr ready;
  CudaStream stream = nullptr;
};

// The result of a completed request on a GPU: it is valid when the device has reached `done`, unless the job has broken
// meanwhile.
class GpuResult {
 public:
  explicit GpuResult(GpuEventPtr done) : done_(std::move(done)) {}

  const GpuEvent& done() const { return *done_; }
  // Any thread: marks the result as failed. The first call sets the reason.
  void fail(const Status& status);
  // Any thread.
  Status failure() const { return has_failed_.load() ? failure_ : Status(); }
  // After fail(): the device does not use the tensors' memory any more, or it did not end in time.
  void let_go() { is_over_.store(true); }
  bool is_over() const { return is_over_.load(); }

 private:
  const GpuEventPtr done_;
  std::mutex mutex_;  // taken by fail(); a leaf: no other lock is taken while it is held
  Status failure_;    // written once, before has_failed_
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_over_{false};
};

using GpuResultPtr = std::shared_ptr<GpuResult>;

// Pinned host memory, for copies that run while the host does something else.
class PinnedMemory {
 public:
  PinnedMemory(std::shared_ptr<Gpu> gpu, char* data, uint64_t num_bytes)
      : gpu_(std::move(gpu)), data_(data), num_bytes_(num_bytes) {}
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  char* data() const { return data_; }
  uint64_t num_bytes() const { return num_bytes_; }

 private:
  const std::shared_ptr<Gpu> gpu_;
  char* const data_;
  const uint64_t num_bytes_;
};

// Functions may be called by any thread with any current context, which they restore.
class Gpu : public std::enable_shared_from_this<Gpu> {
 public:
  // `device`: the driver's number among the visible GPUs. An error: the reason why it cannot be used.
  static Status open(const CudaApi& cuda, int device, std::shared_ptr<Gpu>* gpu);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  int device() const { return device_; }
  const CudaUuid& uuid() const { return uuid_; }
  // The GPUs that this process sees; empty if the driver returns an error.
  std::vector<CudaUuid> visible() const;

  // Makes a non-blocking stream of the highest priority: the default stream and this one do not wait for each other.
  Status make_stream(CudaStream* stream);
  void destroy_stream(CudaStream stream);
  // Records an event at the current end of a stream's work.
  Status record(CudaStream stream, GpuEventPtr* event);
  // The same for a stream that is not the engine's. HVL_INVALID_ARGUMENT: it is being captured into a graph, or it is
  // not the same stream in all threads.
  Status record_callers(CudaStream stream, GpuEventPtr* event);
  Status allocate_pinned(uint64_t num_bytes, std::shared_ptr<PinnedMemory>* memory);
  // Begin to copy; memory of the host must be pinned.
  Status copy_to_host(const void* from, char* to, uint64_t num_bytes, CudaStream stream);
  Status copy_to_device(const char* from, void* to, uint64_t num_bytes, CudaStream stream);
  Status copy_on_device(const void* from, void* to, uint64_t num_bytes, CudaStream stream);

  // While this lives, the GPU's context is current in the calling thread, as NCCL requires, and the thread's capture
  // mode is relaxed: else calls of this thread would fail while another thread captures a graph, and break the capture.
  class Current {
   public:
    explicit Current(const Gpu& gpu);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    const Status& status() const { return status_; }

   private:
    const CudaApi& cuda_;
    int capture_mode_ = kCudaCaptureModeRelaxed;  // later the thread's own mode, to be restored
    Status status_;
  };

 private:
  friend class GpuEvent;
  friend class PinnedMemory;

  Gpu(const CudaApi& cuda, int device) : cuda_(cuda), device_(device) {}
  Status check_not_captured(CudaStream stream) const;
  template <typename Call>
  Status call(const char* what, Call&& call) const;
  Status take_event(CudaEvent* event);

  const CudaApi cuda_;
  const int device_;
  CudaDevice handle_ = 0;
  CudaUuid uuid_{};
  CudaContext context_ = nullptr;
  std::atomic<uint64_t> failing_since_{0};
  std::mutex mutex_;               // a leaf
  std::vector<CudaEvent> events_;  // unused ones; guarded by mutex_
};

}  // namespace hvl
