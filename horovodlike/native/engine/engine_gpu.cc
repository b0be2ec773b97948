// The part of the engine for tensors on GPUs: they complete when the device has been given all there is to do.

#include <utility>

#include "base/log.h"
#include "engine/engine.h"

namespace hvl {

Status Engine::begin_on_gpu() {
  if (gpu_plane_ == nullptr) {
    auto plane = std::make_unique<NcclDataPlane>(options_.gpu, gpu_access_.gpu(), data_plane_.get(), &waiter_,
                                                 options_.local_rank, options_.size);
    const Status status = plane->open([this](const char* input) { return name_of_input(input); });
    if (!status.ok()) return status;
    gpu_plane_ = std::move(plane);
  }
  gpu_plane_->begin(team_, num_executed_);
  gpu_plane_->set_name(name_collective());
  Status status;
  for (const NamedTensor* tensor : tensors_) {
    if (status.ok()) status = gpu_plane_->hold_until_ready(*tensor->entry->gpu);
  }
  return status;
}

std::string Engine::name_collective() const {
  const Signature& signature = tensors_.front()->entry->signature();
  std::string name = std::string("the ") + name_of(signature.kind) + " of '" + signature.name + "'";
  if (tensors_.size() > 1) name += " and " + std::to_string(tensors_.size() - 1) + " more";
  return name;
}

// While another thread captures a graph, memory of a GPU can only be had by who says that it is no part of that.
void* Engine::allocate_by_caller(const hvl_callbacks& callbacks, int32_t index, const hvl_output& output) const {
  const std::shared_ptr<Gpu> gpu = is_on_gpu_ ? gpu_access_.gpu() : nullptr;
  std::optional<Gpu::Current> current;
  if (gpu != nullptr) current.emplace(*gpu);
  return callbacks.allocate(callbacks.context, index, &output);
}

std::string Engine::name_of_input(const char* input) const {
  for (const NamedTensor* tensor : tensors_) {
    const PendingRequest& entry = *tensor->entry;
    for (size_t t = 0; t < entry.signature().tensors.size(); ++t) {
      if (entry.memory_of(t).input == input) return entry.signature().name;
    }
  }
  return tensors_.front()->entry->signature().name;
}

// The caller's allocator may have handed out memory that the caller's stream still works with.
Status Engine::hold_until_allocated(Status status) {
  if (!status.ok() || !is_on_gpu_) return status;
  return gpu_plane_->hold_until_now(*tensors_.front()->entry->gpu);
}

Status Engine::prepare_adasum_on_gpu(const Known& first) {
  auto averaged = averaged_by_adasum(first.signature.process_set);
  const auto work = [this, averaged = std::move(averaged), has_begun = false](DataPlane* cpu) mutable {
    if (!has_begun) adasum_.begin(host_batch_, *team_, averaged);  // it reads the batch, which is there only now
    has_begun = true;
    return adasum_.go_on(cpu);
  };
  return gpu_plane_->prepare_on_host(batch_, &host_batch_, work);
}

// What the request's handle is to keep; who is called back has his stream wait instead.
GpuResultPtr Engine::result_on_gpu(const PendingRequest& entry, Status* status) {
  const GpuResultPtr& result = gpu_plane_->result();
  if (result != nullptr && entry.callbacks.done != nullptr) *status = result->done().hold_up(entry.gpu->stream);
  return result;
}

Status Engine::watch_gpu() { return is_gpu_busy() ? gpu_plane_->check() : Status(); }

void Engine::warn_of_busy_gpu() {
  if (warned_of_gpu_ || now_ns() - leaving_since_ < options_.leave_timeout) return;
  warned_of_gpu_ = true;
  log(LogLevel::kWarning, waiter_.describe(options_.local_rank) +
                              " was told to shut down, and goes on waiting for its GPU, which is not done with the "
                              "collectives that it was given before");
}

void Engine::end_on_gpu(const Status& status) {
  if (gpu_plane_ == nullptr) return;
  if (status.code() == HVL_JOB_BROKEN) {
    gpu_plane_->abort(status);
  } else {
    gpu_plane_->close();
  }
}

}  // namespace hvl
