#include "cuda/gpu.h"

#include <utility>

#include "base/clock.h"

namespace hvl {

namespace {

CudaPointer on_device(const void* address) { return reinterpret_cast<CudaPointer>(address); }

}  // namespace

GpuEvent::~GpuEvent() {
  const std::lock_guard<std::mutex> lock(gpu_->mutex_);
  gpu_->events_.push_back(event_);
}

Status GpuEvent::hold_up(CudaStream stream) const {
  return gpu_->call("a stream cannot wait", [&] { return gpu_->cuda_.cuStreamWaitEvent(stream, event_, 0); });
}

Status GpuEvent::hold_up_callers(CudaStream stream) const {
  const Status status = gpu_->check_not_captured(stream);
  return status.ok() ? hold_up(stream) : status;
}

Status GpuEvent::query(bool* done) const {
  const Status status = ask(done);
  uint64_t not_failing = 0;
  if (!status.ok()) {
    gpu_->failing_since_.compare_exchange_strong(not_failing, now_ns());
  } else if (failing_since() != 0) {
    gpu_->failing_since_.store(0);
  }
  return status;
}

uint64_t GpuEvent::failing_since() const { return gpu_->failing_since_.load(); }

Status GpuEvent::ask(bool* done) const {
  const Gpu::Current current(*gpu_);
  if (!current.status().ok()) return current.status();
  const CudaResult result = gpu_->cuda_.cuEventQuery(event_);
  *done = result == kCudaSuccess;
  return result == kCudaNotReady ? Status() : gpu_->cuda_.check(result, "the device has failed");
}

void GpuResult::fail(const Status& status) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (has_failed_.load()) return;
  failure_ = status;
  has_failed_.store(true);
}

PinnedMemory::~PinnedMemory() {
  const Gpu::Current current(*gpu_);
  if (current.status().ok()) gpu_->cuda_.cuMemFreeHost(data_);
}

Status Gpu::open(const CudaApi& cuda, int device, std::shared_ptr<Gpu>* gpu) {
  int count = 0;
  Status status = cuda.check(cuda.cuDeviceGetCount(&count), "the GPUs cannot be counted");
  if (status.ok() && (device < 0 || device >= count)) {
    status = Status(HVL_INVALID_ARGUMENT, "there is no GPU " + std::to_string(device) + ": this process sees " +
                                              std::to_string(count) + " of them");
  }
  if (!status.ok()) return status;
  std::shared_ptr<Gpu> opened(new Gpu(cuda, device));
  status = cuda.check(cuda.cuDeviceGet(&opened->handle_, device), "the GPU cannot be found");
  if (status.ok()) status = cuda.check(cuda.cuDeviceGetUuid(&opened->uuid_, opened->handle_), "the GPU has no UUID");
  if (status.ok()) {
    // The context that the CUDA runtime uses, and so every framework.
    status = cuda.check(cuda.cuDevicePrimaryCtxRetain(&opened->context_, opened->handle_), "the GPU has no context");
  }
  if (status.ok()) *gpu = std::move(opened);
  return status;
}

Gpu::~Gpu() {
  if (context_ == nullptr) return;
  {
    const Current current(*this);
    for (CudaEvent event : events_) cuda_.cuEventDestroy(event);
  }
  cuda_.cuDevicePrimaryCtxRelease(handle_);
}

Gpu::Current::Current(const Gpu& gpu)
    : cuda_(gpu.cuda_), status_(cuda_.check(cuda_.cuCtxPushCurrent(gpu.context_), "the GPU's context cannot be used")) {
  if (status_.ok()) cuda_.cuThreadExchangeStreamCaptureMode(&capture_mode_);
}

Gpu::Current::~Current() {
  if (!status_.ok()) return;
  CudaContext ignored;
  cuda_.cuThreadExchangeStreamCaptureMode(&capture_mode_);
  cuda_.cuCtxPopCurrent(&ignored);
}

template <typename Call>
Status Gpu::call(const char* what, Call&& call) const {
  const Current current(*this);
  return current.status().ok() ? cuda_.check(call(), what) : current.status();
}

std::vector<CudaUuid> Gpu::visible() const {
  int count = 0;
  if (cuda_.cuDeviceGetCount(&count) != kCudaSuccess) return {};
  std::vector<CudaUuid> uuids(static_cast<size_t>(count));
  for (int device = 0; device < count; ++device) {
    CudaDevice handle = 0;
    CudaResult result = cuda_.cuDeviceGet(&handle, device);
    if (result == kCudaSuccess) result = cuda_.cuDeviceGetUuid(&uuids[static_cast<size_t>(device)], handle);
    if (result != kCudaSuccess) return {};
  }
  return uuids;
}

Status Gpu::make_stream(CudaStream* stream) {
  return call("a stream cannot be made", [&] {
    int least = 0;
    int greatest = 0;
    const CudaResult result = cuda_.cuCtxGetStreamPriorityRange(&least, &greatest);
    return result == kCudaSuccess ? cuda_.cuStreamCreateWithPriority(stream, kCudaStreamNonBlocking, greatest) : result;
  });
}

void Gpu::destroy_stream(CudaStream stream) {
  const Current current(*this);
  if (current.status().ok()) cuda_.cuStreamDestroy(stream);
}

Status Gpu::take_event(CudaEvent* event) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!events_.empty()) {
      *event = events_.back();
      events_.pop_back();
      return Status();
    }
  }
  return call("an event cannot be made", [&] { return cuda_.cuEventCreate(event, kCudaEventDisableTiming); });
}

Status Gpu::check_not_captured(CudaStream stream) const {
  int capturing = kCudaNotCapturing;
  const Status status = call("a stream cannot be used", [&] {
    const CudaResult result = cuda_.cuStreamIsCapturing(stream, &capturing);
    if (result != kCudaCaptureImplicit) return result;
    capturing = kCudaNotCapturing + 1;
    return kCudaSuccess;
  });
  if (!status.ok() || capturing == kCudaNotCapturing) return status;
  return Status(
      HVL_INVALID_ARGUMENT,
      "the stream is being captured into a CUDA graph, and collectives cannot be part of one, since the ranks "
      "agree about each of them when it runs: enqueue them, and wait for them, outside of the graph");
}

Status Gpu::record_callers(CudaStream stream, GpuEventPtr* event) {
  if (stream == kCudaStreamPerThread) {
    return Status(HVL_INVALID_ARGUMENT,
                  "the stream is the default stream of each thread (cudaStreamPerThread), which is another one in the "
                  "engine's thread: use the default stream, or one that was created");
  }
  const Status status = check_not_captured(stream);
  return status.ok() ? record(stream, event) : status;
}

Status Gpu::record(CudaStream stream, GpuEventPtr* event) {
  CudaEvent taken = nullptr;
  Status status = take_event(&taken);
  if (!status.ok()) return status;
  auto made = std::make_shared<GpuEvent>(shared_from_this(), taken);
  status = call("an event cannot be recorded", [&] { return cuda_.cuEventRecord(taken, stream); });
  if (status.ok()) *event = std::move(made);
  return status;
}

Status Gpu::allocate_pinned(uint64_t num_bytes, std::shared_ptr<PinnedMemory>* memory) {
  void* data = nullptr;
  Status status = call("no pinned memory on the host",
                       [&] { return cuda_.cuMemHostAlloc(&data, num_bytes, kCudaHostAllocPortable); });
  if (status.ok()) {
    *memory = std::make_shared<PinnedMemory>(shared_from_this(), static_cast<char*>(data), num_bytes);
  }
  return status;
}

Status Gpu::copy_to_host(const void* from, char* to, uint64_t num_bytes, CudaStream stream) {
  return call("a copy to the host has failed",
              [&] { return cuda_.cuMemcpyDtoHAsync(to, on_device(from), num_bytes, stream); });
}

Status Gpu::copy_to_device(const char* from, void* to, uint64_t num_bytes, CudaStream stream) {
  return call("a copy to the device has failed",
              [&] { return cuda_.cuMemcpyHtoDAsync(on_device(to), from, num_bytes, stream); });
}

Status Gpu::copy_on_device(const void* from, void* to, uint64_t num_bytes, CudaStream stream) {
  return call("a copy on the device has failed",
              [&] { return cuda_.cuMemcpyDtoDAsync(on_device(to), on_device(from), num_bytes, stream); });
}

}  // namespace hvl
