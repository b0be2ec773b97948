// One GPU as this process uses it: its context, events, and memory of the host that it can copy from and to.
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

// A point in the work of a stream. Goes back to its GPU's pool with the last who has it, also if the stream has not got
// there: other streams that wait for this point keep it when the event is recorded again.
class GpuEvent {
 public:
  GpuEvent(std::shared_ptr<Gpu> gpu, CudaEvent event) : gpu_(std::move(gpu)), event_(event) {}
  ~GpuEvent();
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;

  // Has a stream of the same GPU do what it is given from now on only after this. Any thread; does not block.
  Status hold_up(CudaStream stream) const;
  // The same for one that is not the engine's. HVL_INVALID_ARGUMENT: it is being captured into a graph.
  Status hold_up_callers(CudaStream stream) const;
  // Whether the device has got there. An error is the device's own, from whatever has run on it.
  Status query(bool* done) const;
  // Since when every query of an event of this GPU has failed (now_ns() time); 0: the last one did not.
  uint64_t failing_since() const;

 private:
  Status ask(bool* done) const;

  const std::shared_ptr<Gpu> gpu_;
  const CudaEvent event_;
};

using GpuEventPtr = std::shared_ptr<const GpuEvent>;

// Where the work of a request's caller is: the engine begins after what `stream` had been given by then.
struct GpuRequest {
  GpuEventPtr ready;
  CudaStream stream = nullptr;
};

// What a request on a GPU leaves when it completes: its result is there when the device has got to `done`, unless the
// job has broken meanwhile.
class GpuResult {
 public:
  explicit GpuResult(GpuEventPtr done) : done_(std::move(done)) {}

  const GpuEvent& done() const { return *done_; }
  // Any thread: the device will not get there as it should. The first one says why.
  void fail(const Status& status);
  // Any thread.
  Status failure() const { return has_failed_.load() ? failure_ : Status(); }
  // After fail(): the device does not use the tensors' memory any more, or is left behind.
  void let_go() { is_over_.store(true); }
  bool is_over() const { return is_over_.load(); }

 private:
  const GpuEventPtr done_;
  std::mutex mutex_;  // of who fails it; a leaf
  Status failure_;    // written once, before has_failed_
  std::atomic<bool> has_failed_{false};
  std::atomic<bool> is_over_{false};
};

using GpuResultPtr = std::shared_ptr<GpuResult>;

// Host memory at a fixed place, to be copied from and to while the host does something else.
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

// Functions may be called by any thread, whatever its context is; it is the same afterwards.
class Gpu : public std::enable_shared_from_this<Gpu> {
 public:
  // `device`: as the driver numbers those that are visible. HVL_RESOURCES: why it cannot be used.
  static Status open(const CudaApi& cuda, int device, std::shared_ptr<Gpu>* gpu);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  int device() const { return device_; }
  const CudaUuid& uuid() const { return uuid_; }
  // Of all GPUs that this process sees; empty if the driver does not say.
  std::vector<CudaUuid> visible() const;

  // A stream of its own, which no other waits for unless it is told to, and of the highest priority.
  Status make_stream(CudaStream* stream);
  void destroy_stream(CudaStream stream);
  // Notes where a stream is.
  Status record(CudaStream stream, GpuEventPtr* event);
  // The same for one that is not the engine's. HVL_INVALID_ARGUMENT: it is being captured into a graph, or it is not
  // the same stream in all threads.
  Status record_callers(CudaStream stream, GpuEventPtr* event);
  Status allocate_pinned(uint64_t num_bytes, std::shared_ptr<PinnedMemory>* memory);
  // Begin to copy; the host's memory is pinned.
  Status copy_to_host(const void* from, char* to, uint64_t num_bytes, CudaStream stream);
  Status copy_to_device(const char* from, void* to, uint64_t num_bytes, CudaStream stream);
  Status copy_on_device(const void* from, void* to, uint64_t num_bytes, CudaStream stream);

  // As long as this lives the GPU's context is that of the calling thread, as NCCL wants it. And what the thread calls
  // does not count as part of a graph that another one may be capturing: that would fail, and so would the capture.
  class Current {
   public:
    explicit Current(const Gpu& gpu);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    const Status& status() const { return status_; }

   private:
    const CudaApi& cuda_;
    int capture_mode_ = kCudaCaptureModeRelaxed;  // then the thread's own
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
  std::vector<CudaEvent> events_;  // that nobody uses; guarded by mutex_
};

}  // namespace hvl
