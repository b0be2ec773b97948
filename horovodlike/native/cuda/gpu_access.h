// Access of framework threads to the GPU of this rank: opened with the first request on a GPU.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "cuda/gpu.h"

namespace hvl {

enum class GpuOperations : int {
  kAuto = HVL_GPU_AUTO,
  kNccl = HVL_GPU_NCCL,
  kStaging = HVL_GPU_STAGING,
};

struct GpuOptions {
  std::string cuda_library;  // files; empty: the loader looks for them
  std::string nccl_library;
  GpuOperations operations = GpuOperations::kAuto;
  uint64_t staging_bytes = 8 << 20;  // bytes copied at once; a multiple of kAlignment, the same on all ranks
};

class GpuAccess {
 public:
  explicit GpuAccess(const GpuOptions& options) : options_(options) {}

  // Any thread: records the work that `stream` of GPU `device` has been given so far. HVL_INVALID_ARGUMENT: the rank
  // uses another GPU, or the stream cannot be used; HVL_RESOURCES: the GPU cannot be used.
  Status request(int device, CudaStream stream, std::shared_ptr<const GpuRequest>* request);
  // Any thread: the GPU of the requests so far; null before the first one.
  std::shared_ptr<Gpu> gpu() const;

 private:
  Status open(int device);  // mutex_ is held

  const GpuOptions options_;
  mutable std::mutex mutex_;  // taken before a Gpu's mutexes
  std::shared_ptr<Gpu> gpu_;
};

}  // namespace hvl
