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

  // The rest is for the holder of the engine lock.
  Status begin(const Collective& collective);
  DataPlane* plane() const { return plane_.get(); }
  // The outputs have been allocated. The caller's allocator may have given memory that the caller's stream still works
  // with.
  Status hold_until_allocated() { return plane_->stream().hold_until_now(*collective_->first().gpu); }
  void* allocate_by_caller(const hvl_callbacks& callbacks, int32_t index, const hvl_output& output) const;
  Status prepare_adasum(const Batch& batch, Adasum* adasum, std::vector<AveragedMembers> averaged);
  Status go_on_with_adasum() { return plane_->on_host(); }
  // The part of the result that the request's handle must keep. Where the caller is called back instead, its stream
  // waits.
  GpuResultPtr result_of(const PendingRequest& request, Status* status) const;

  bool is_working() const { return plane_ != nullptr && plane_->stream().is_working(); }
  bool is_busy() const { return plane_ != nullptr && plane_->is_busy(); }
  // Whether the device still works well.
  Status check() { return is_busy() ? plane_->check() : Status(); }
  // This rank has waited for the device since the log ended, at `leaving_since`.
  void warn_if_busy(uint64_t leaving_since);
  void forget(const TeamPtr& team);
  void end(const Status& status);

 private:
  std::string name_collective() const;
  std::string name_of_input(const char* input) const;  // null: the first tensor's

  EngineContext& context_;
  GpuAccess access_;
  std::unique_ptr<NcclDataPlane> plane_;    // from the first collective on a GPU on
  const Collective* collective_ = nullptr;  // under way
  Batch host_batch_;                        // Adasum works on it
  bool has_warned_ = false;
};

}  // namespace hvl
