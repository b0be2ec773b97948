#include "engine/engine.h"

#include <cstring>
#include <utility>

#include "observe/stack_dump.h"

namespace hvl {

Engine::Engine(const EngineOptions& options, std::shared_ptr<HostMemory> memory, HandleTable* handles)
    : context_(options, std::move(memory), handles),
      requests_(&context_),
      reporter_(&context_),
      tuner_(&context_),
      gpu_(&context_),
      executor_(&context_, &requests_, &reporter_, &tuner_, &gpu_),
      negotiator_(&context_, &requests_, &executor_, &gpu_),
      watch_(&context_, &requests_, &negotiator_, &gpu_),
      shutdown_(&context_, &requests_, &executor_, &negotiator_, &reporter_, &tuner_, &gpu_),
      loop_(&context_, &requests_, &executor_, &negotiator_, &tuner_, &watch_, &shutdown_) {}

Engine::~Engine() { shut_down(); }

void Engine::shut_down(const std::string& reason) {
  if (!context_.stop_requested.load()) context_.stop_reason = reason;  // the destructor calls this again
  context_.stop_requested.store(true);
  stop_answering(context_.memory.get(), context_.options.local_rank);
  context_.notify_news();
  loop_.join();
  reporter_.timeline().stop();
  reporter_.profile_timeline().stop();
}

void Engine::close_in_child() {
  context_.control->close_in_child();
  context_.data_plane->close_in_child();
  context_.messenger.close_in_child();
}

Status Engine::enqueue(std::unique_ptr<PendingRequest> request, int64_t* handle) {
  const bool with_handle = request->callbacks.done == nullptr;
  // Not deferred: a request with a completion function, as its caller does not wait in the engine; and, without
  // overlap, a request on a GPU: the deferral spares the processors, but the GPU does the work of this request.
  const bool is_urgent = !with_handle || (request->gpu != nullptr && !context_.options.overlap);
  HandleTable& handles = *context_.handles;
  const uint64_t now = request->enqueued_at = now_ns();
  if (request->is_copied) {
    const size_t num_bytes = static_cast<size_t>(request->operation->total_bytes);
    char* copy;
    request->handle = handles.create_with_copy(num_bytes, &copy);
    memcpy(copy, request->memory.input, num_bytes);
    request->memory = {copy, copy};
  } else {
    request->handle = with_handle ? handles.create() : 0;
  }
  *handle = request->handle;
  context_.counters.time.enqueue(now);
  Status status = context_.queue.push(std::move(request));
  if (!status.ok()) {
    context_.counters.time.withdraw();
    if (with_handle) handles.discard(*handle);
    *handle = 0;
    return status;
  }
  if (is_urgent) loop_.flush_next();
  return status;
}

Status Engine::post(MessageRequestPtr request, int64_t* handle) {
  Status status = context_.messenger.post(std::move(request), handle);
  if (status.ok()) loop_.progress_messages();
  return status;
}

Status Engine::request_gpu(int device, CudaStream stream, std::shared_ptr<const GpuRequest>* request) {
  const Status status = job_status();  // checked first: in a broken job the device may fail, too
  return status.ok() ? gpu_.access().request(device, stream, request) : status;
}

}  // namespace hvl
