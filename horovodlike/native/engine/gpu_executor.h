// Collectives of tensors on GPUs: they complete when the device has been given all their work.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/adasum.h"
#include "engine/collective_reporter.h"
#include "nccl/nccl_data_plane.h"

namespace hvl {

class GpuExecutor {
 public:
  explicit GpuExecutor(EngineContext* context) : context_(*context), access_(context->options.gpu) {}

  // Any thread.
  GpuAccess& access() { return access_; }

  // Only the holder of the engine lock may call the rest.
  Status begin(const Collective& collective, hvl_transport transport);
  DataPlane* plane() const { return plane_.get(); }
  // Called when the outputs are allocated: the engine's stream waits for the caller's, which may still use the memory
  // that the caller's allocator has returned.
  Status hold_until_allocated() { return plane_->stream().hold_until_now(*collective_->first().gpu); }
  void* allocate_by_caller(const hvl_callbacks& callbacks, int32_t index, const hvl_output& output) const;
  Status prepare_adasum(const Batch& batch, Adasum* adasum, std::vector<AveragedMembers> averaged);
  Status resume_adasum() { return plane_->on_host(); }
  // Returns the part of the result that the request's handle must keep. If the request has a completion function, also
  // makes the caller's stream wait for the result.
  GpuResultPtr result_of(const PendingRequest& request, Status* status) const;

  bool is_working() const { return plane_ != nullptr && plane_->stream().is_working(); }
  bool is_busy() const { return plane_ != nullptr && plane_->is_busy(); }
  // Returns an error if the device or NCCL has failed, or makes no progress for too long.
  Status check() { return is_busy() ? plane_->check() : Status(); }
  // Warns, once, if this rank waits for the device for leave_timeout or longer since the log ended, at `leaving_since`.
  void warn_if_busy(uint64_t leaving_since);
  void forget(const TeamPtr& team);
  void end(const Status& status);

 private:
  std::string name_collective() const;
  std::string name_of_input(const char* input) const;  // the first tensor's if there is no such input

  EngineContext& context_;
  GpuAccess access_;
  std::unique_ptr<NcclDataPlane> plane_;    // null before the first collective on a GPU
  const Collective* collective_ = nullptr;  // the collective under way
  Batch host_batch_;                        // the batch's copy on the host, for Adasum
  bool has_warned_ = false;
};

}  // namespace hvl
