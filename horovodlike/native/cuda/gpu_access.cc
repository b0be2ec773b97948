#include "cuda/gpu_access.h"

#include <utility>

namespace hvl {

Status GpuAccess::open(int device) {
  if (gpu_ == nullptr) {
    CudaApi cuda{};
    Status status = CudaApi::load(options_.cuda_library, &cuda);
    if (status.ok()) status = cuda.init();
    return status.ok() ? Gpu::open(cuda, device, &gpu_) : status;
  }
  if (gpu_->device() == device) return Status();
  return Status(HVL_INVALID_ARGUMENT, "the tensor is on GPU " + std::to_string(device) +
                                          ", but this rank has used GPU " + std::to_string(gpu_->device()) +
                                          " before: each rank has one GPU, start a rank for each");
}

Status GpuAccess::request(int device, CudaStream stream, std::shared_ptr<const GpuRequest>* request) {
  std::shared_ptr<Gpu> used;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Status status = open(device);
    if (!status.ok()) return status;
    used = gpu_;
  }
  auto made = std::make_shared<GpuRequest>();
  made->stream = stream;
  Status status = used->record_callers(stream, &made->ready);
  if (status.ok()) *request = std::move(made);
  return status;
}

std::shared_ptr<Gpu> GpuAccess::gpu() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return gpu_;
}

}  // namespace hvl
