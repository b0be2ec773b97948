#include "engine/gpu_executor.h"

#include <optional>
#include <utility>

#include "base/log.h"

namespace hvl {

Status GpuExecutor::begin(const Collective& collective, hvl_transport transport) {
  collective_ = &collective;
  if (plane_ == nullptr) {
    auto plane = std::make_unique<NcclDataPlane>(context_.options.gpu, access_.gpu(), context_.data_plane.get(),
                                                 &context_.waiter, context_.options.local_rank, context_.options.size);
    const Status status = plane->open([this](const char* input) { return name_of_input(input); });
    if (!status.ok()) return status;
    plane_ = std::move(plane);
  }
  plane_->allow_nccl(transport != HVL_STAGING);
  plane_->begin(collective.team, collective.number);
  plane_->stream().set_name(name_collective());
  Status status;
  for (const NamedTensor* tensor : collective.tensors) {
    if (status.ok()) status = plane_->stream().hold_until_ready(*tensor->request->gpu);
  }
  return status;
}

std::string GpuExecutor::name_collective() const {
  const Signature& signature = collective_->first().signature();
  std::string name = std::string("the ") + name_of(signature.kind) + " of '" + signature.name + "'";
  if (collective_->tensors.size() > 1) name += " and " + std::to_string(collective_->tensors.size() - 1) + " more";
  return name;
}

std::string GpuExecutor::name_of_input(const char* input) const {
  for (const NamedTensor* tensor : collective_->tensors) {
    const PendingRequest& request = *tensor->request;
    for (size_t t = 0; t < request.signature().tensors.size(); ++t) {
      if (request.memory_of(t).input == input) return request.signature().name;
    }
  }
  return collective_->first().signature().name;
}

// Gpu::Current keeps the allocation out of a graph that another thread may be capturing.
void* GpuExecutor::allocate_by_caller(const hvl_callbacks& callbacks, int32_t index, const hvl_output& output) const {
  const std::shared_ptr<Gpu> gpu = access_.gpu();
  std::optional<Gpu::Current> current;
  if (gpu != nullptr) current.emplace(*gpu);
  return callbacks.allocate(callbacks.context, index, &output);
}

Status GpuExecutor::prepare_adasum(const Batch& batch, Adasum* adasum, std::vector<AveragedMembers> averaged) {
  const auto work = [this, adasum, averaged = std::move(averaged), has_begun = false](DataPlane* cpu) mutable {
    // Adasum reads the batch when it begins, and the copy on the host exists only now.
    if (!has_begun) adasum->begin(host_batch_, *collective_->team, averaged);
    has_begun = true;
    return adasum->resume(cpu);
  };
  return plane_->prepare_on_host(batch, &host_batch_, work);
}

GpuResultPtr GpuExecutor::result_of(const PendingRequest& request, Status* status) const {
  const GpuResultPtr& result = plane_->stream().result();
  if (result != nullptr && request.callbacks.done != nullptr) *status = result->done().hold_up(request.gpu->stream);
  return result;
}

void GpuExecutor::warn_if_busy(uint64_t leaving_since) {
  if (has_warned_ || now_ns() - leaving_since < context_.options.leave_timeout) return;
  has_warned_ = true;
  log(LogLevel::kWarning, context_.describe_self() +
                              " was told to shut down, and goes on waiting for its GPU, which is not done with the "
                              "collectives that it was given before");
}

void GpuExecutor::forget(const TeamPtr& team) {
  if (plane_ != nullptr) plane_->forget(team);
}

void GpuExecutor::end(const Status& status) {
  if (plane_ == nullptr) return;
  if (status.code() == HVL_JOB_BROKEN) {
    plane_->abort(status);
  } else {
    plane_->close();
  }
}

}  // namespace hvl
