// The functions of hvl.h for requests, from their preparation to their results.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "api/c_api.h"

struct hvl_prepared {
  std::shared_ptr<hvl::Operation> operation;
};

namespace hvl {
namespace {

Status check_against_job(const Signature& signature, const EngineOptions& options) {
  const std::vector<int64_t>& ranks = signature.arguments;
  if (signature.is_by_members() && !std::binary_search(ranks.begin(), ranks.end(), options.rank)) {
    return Status(HVL_INVALID_ARGUMENT, "rank " + std::to_string(options.rank) +
                                            " is no member of the process set of '" + signature.name +
                                            "', which its members add");
  }
  if (!has_root(signature.kind) || (signature.root >= 0 && signature.root < options.size)) return Status();
  return Status(HVL_INVALID_ARGUMENT, std::string(name_of(signature.kind)) + " of '" + signature.name +
                                          "' has the root rank " + std::to_string(signature.root) +
                                          ", but the ranks of this job are 0 to " + std::to_string(options.size - 1));
}

Status check_inplace(const Signature& signature) {
  const bool has_another_output = allocates(signature.kind) || signature.kind == HVL_SCATTER;
  if (signature.tensors.size() == 1 && !has_another_output) return Status();
  return Status(HVL_INVALID_ARGUMENT,
                "'" + signature.name + "' is not an operation of one tensor that is input and output");
}

Status check_copied(const Operation& operation) {
  const Signature& signature = operation.signature;
  if (signature.device == HVL_CPU && operation.total_bytes <= HVL_MAX_COPIED_BYTES) return Status();
  return Status(HVL_INVALID_ARGUMENT, "'" + signature.name + "' is not on the CPU, or has more than " +
                                          std::to_string(HVL_MAX_COPIED_BYTES) + " bytes: the engine does not copy it");
}

Status check_device(const Signature& signature, const hvl_callbacks* callbacks, bool has_stream) {
  if ((signature.device == HVL_CUDA) != has_stream) {
    return Status(HVL_INVALID_ARGUMENT, has_stream ? "'" + signature.name + "' is on the CPU, which has no stream"
                                                   : "'" + signature.name + "' is on a GPU: it needs a stream");
  }
  const bool has_memory =
      callbacks != nullptr && callbacks->allocate != nullptr && callbacks->allocate != hvl_place_output;
  if (!has_stream || !allocates(signature.kind) || has_memory) return Status();
  return Status(HVL_INVALID_ARGUMENT,
                std::string("the ") + name_of(signature.kind) + " of '" + signature.name +
                    "' on a GPU needs a function of its own that allocates its outputs: the engine has no memory of "
                    "GPUs");
}

constexpr uintptr_t kLowestAddress = 1 << 16;  // below it there is no memory

// Rejects a tensor whose storage has been freed: it has a shape, but its address is null, or its offset in the storage.
// A scatter reads the root's inputs only.
Status check_memory(const Operation& operation, int rank, const uintptr_t* inputs, const uintptr_t* outputs) {
  const Signature& signature = operation.signature;
  const uintptr_t* used = signature.kind == HVL_SCATTER && signature.root != rank ? outputs : inputs;
  for (size_t t = 0; t < operation.num_bytes.size(); ++t) {
    if (operation.num_bytes[t] == 0 || used[t] >= kLowestAddress) continue;
    return Status(HVL_INVALID_ARGUMENT, "a tensor of '" + signature.name + "' has no memory for its " +
                                            std::to_string(operation.num_bytes[t]) +
                                            " bytes: was its storage resized?");
  }
  return Status();
}

using GpuRequestPtr = std::shared_ptr<const GpuRequest>;

// Null outputs: the engine allocates them. Null `gpu`: the tensors are on the CPU.
Status enqueue(Engine* engine, const hvl_prepared& prepared, const uintptr_t* inputs, const uintptr_t* outputs,
               const hvl_callbacks* callbacks, const GpuRequestPtr& gpu, int64_t* handle, bool is_copied = false) {
  const Signature& signature = prepared.operation->signature;
  Status fits = check_against_job(signature, engine->options());
  if (fits.ok()) fits = check_device(signature, callbacks, gpu != nullptr);
  if (fits.ok()) fits = check_memory(*prepared.operation, engine->options().rank, inputs, outputs);
  if (!fits.ok()) return fits;
  auto memory = [&](size_t t) {
    return Memory{reinterpret_cast<const char*>(inputs[t]),
                  outputs != nullptr ? reinterpret_cast<char*>(outputs[t]) : nullptr};
  };
  auto request = std::make_unique<PendingRequest>();
  request->operation = prepared.operation;
  if (callbacks != nullptr) request->callbacks = *callbacks;
  request->gpu = gpu;
  request->is_copied = is_copied;
  if (!signature.tensors.empty()) request->memory = memory(0);
  for (size_t t = 1; t < signature.tensors.size(); ++t) request->more.push_back(memory(t));
  return engine->enqueue(std::move(request), handle);
}

Status enqueue_inplace(Engine* engine, const hvl_prepared& prepared, uintptr_t data, const GpuRequestPtr& gpu,
                       int64_t* handle) {
  Status status = check_inplace(prepared.operation->signature);
  return status.ok() ? enqueue(engine, prepared, &data, &data, nullptr, gpu, handle) : status;
}

Status enqueue_copied(Engine* engine, const hvl_prepared& prepared, uintptr_t data, int64_t* handle) {
  Status status = check_inplace(prepared.operation->signature);
  if (status.ok()) status = check_copied(*prepared.operation);
  return status.ok() ? enqueue(engine, prepared, &data, &data, nullptr, nullptr, handle, true) : status;
}

// Enqueues the requests in order, until one is rejected.
Status enqueue_all(Engine* engine, hvl_prepared* const* prepared, const uintptr_t* data, int32_t count,
                   const GpuRequestPtr& gpu, int64_t* handles) {
  Status status;
  for (int32_t index = 0; index < count && status.ok(); ++index) {
    status = enqueue_inplace(engine, *prepared[index], data[index], gpu, &handles[index]);
  }
  return status;
}

// Enqueues with the running engine, and notifies it of the requests that it accepted.
template <typename Enqueue>
int32_t with_engine(Enqueue&& enqueue) {
  return guarded([&]() -> Status {
    std::shared_ptr<Engine> running = engine();
    if (running == nullptr) return not_initialized();
    Status status = enqueue(running.get());
    running->notify();
    return status;
  });
}

Status post(Engine* engine, MessageRequestPtr request, uintptr_t data, int64_t* handle) {
  if (request->header.num_bytes > 0 && data < kLowestAddress) {
    return Status(HVL_INVALID_ARGUMENT,
                  "a message has no memory for its " + std::to_string(request->header.num_bytes) + " bytes");
  }
  request->data = reinterpret_cast<char*>(data);
  return engine->post(std::move(request), handle);
}

thread_local int64_t last_handle = 0;

// The return value of a call that enqueues one request or message; hvl_last_handle() returns its handle.
int64_t outcome(int32_t status, int64_t handle) {
  last_handle = status == HVL_OK ? handle : 0;
  return status == HVL_OK ? handle : -status;
}

void free_all(const std::vector<hvl_output>& outputs) {
  for (const hvl_output& output : outputs) free(output.data);
}

Status hand_over(const std::vector<hvl_output>& results, hvl_output** outputs, int32_t* num_outputs) {
  if (results.empty()) return Status();
  size_t num_bytes = results.size() * sizeof(hvl_output);
  if (outputs != nullptr) *outputs = static_cast<hvl_output*>(malloc(num_bytes));
  if (outputs == nullptr || *outputs == nullptr) {
    free_all(results);
    return outputs == nullptr ? Status() : Status(HVL_RESOURCES, "no memory to hand over the results");
  }
  memcpy(*outputs, results.data(), num_bytes);
  *num_outputs = static_cast<int32_t>(results.size());
  return Status();
}

int64_t post(bool is_send, uintptr_t data, int64_t num_bytes, int32_t dtype, int32_t peer, int64_t tag,
             int32_t process_set) {
  int64_t handle = 0;
  const int32_t status = guarded([&]() -> Status {
    const std::shared_ptr<Engine> running = engine();
    if (running == nullptr) return not_initialized();
    auto request = std::make_unique<MessageRequest>();
    request->is_send = is_send;
    request->peer = peer;
    request->process_set = process_set;
    request->header.tag = tag;
    request->header.dtype = static_cast<DataType>(dtype);
    request->header.num_bytes = static_cast<uint64_t>(num_bytes);
    return post(running.get(), std::move(request), data, &handle);
  });
  return outcome(status, handle);
}

// Waits until no handle is in progress any more (HVL_OK), or until the deadline or a signal (HVL_IN_PROGRESS).
hvl_status wait(const int64_t* handles, size_t count, uint64_t deadline) {
  std::shared_ptr<Engine> running = engine();
  if (running != nullptr) return running->wait(handles, count, deadline);
  if (is_forked_child()) return HVL_IN_PROGRESS;
  // An engine that is about to end completes all requests.
  while (count > 0 && handle_table().wait(handles[count - 1], deadline) != HVL_IN_PROGRESS) --count;
  return count == 0 ? HVL_OK : HVL_IN_PROGRESS;
}

Status unfinished() {
  if (is_forked_child() && engine() == nullptr) return not_initialized();
  return Status(HVL_IN_PROGRESS, "not complete yet");
}

// Waits for the result of a complete request. HVL_OK: the request is complete, and its result is valid.
hvl_status state_with_result(int64_t handle, uint64_t deadline) {
  const hvl_status state = handle_table().poll(handle);
  if (state != HVL_OK) return state;
  return handle_table().wait_for_results(&handle, 1, deadline, engine() != nullptr);
}

Status hold_up(const int64_t* handles, size_t count, CudaStream stream, uint64_t deadline) {
  return handle_table().hold_up_for_results(handles, count, stream, deadline, engine() != nullptr);
}

// True if the handles must not be consumed: the results are not valid yet, or the stream is being captured.
bool leaves_handles(const Status& held) {
  return held.code() == HVL_INVALID_ARGUMENT || held.code() == HVL_IN_PROGRESS;
}

// Consumes a handle that is in this state, and returns the result of its request. An error if it is not complete.
Status finish(int64_t handle, hvl_status state, hvl_output** outputs, int32_t* num_outputs,
              hvl_received* received = nullptr) {
  if (state == HVL_UNKNOWN_HANDLE) return Status(state, "the handle is unknown or was waited for already");
  if (state == HVL_IN_PROGRESS) return unfinished();
  std::vector<hvl_output> results;
  Status status = handle_table().consume(handle, &results, received);
  if (status.ok()) return hand_over(results, outputs, num_outputs);
  free_all(results);
  return status;
}

}  // namespace
}  // namespace hvl

extern "C" {

hvl_prepared* hvl_prepare(const hvl_request* request) {
  hvl_prepared* prepared = nullptr;
  hvl::guarded([&] {
    std::shared_ptr<hvl::Operation> operation;
    hvl::Status status = hvl::make_operation(*request, &operation);
    if (status.ok()) prepared = new hvl_prepared{std::move(operation)};
    return status;
  });
  return prepared;
}

void hvl_release(hvl_prepared* prepared) { delete prepared; }

int64_t hvl_enqueue(hvl_prepared* prepared, const uintptr_t* inputs, const uintptr_t* outputs,
                    const hvl_callbacks* callbacks) {
  const bool allocates = hvl::allocates(prepared->operation->signature.kind);
  int64_t handle = 0;
  int32_t status = hvl::with_engine([&](hvl::Engine* engine) {
    return hvl::enqueue(engine, *prepared, inputs, allocates ? nullptr : outputs, callbacks, nullptr, &handle);
  });
  return hvl::outcome(status, handle);
}

int64_t hvl_enqueue_on_stream(hvl_prepared* prepared, const uintptr_t* inputs, const uintptr_t* outputs,
                              const hvl_callbacks* callbacks, int32_t device, void* stream) {
  const bool allocates = hvl::allocates(prepared->operation->signature.kind);
  int64_t handle = 0;
  int32_t status = hvl::with_engine([&](hvl::Engine* engine) {
    hvl::GpuRequestPtr gpu;
    hvl::Status ready = engine->request_gpu(device, stream, &gpu);
    if (!ready.ok()) return ready;
    return hvl::enqueue(engine, *prepared, inputs, allocates ? nullptr : outputs, callbacks, gpu, &handle);
  });
  return hvl::outcome(status, handle);
}

int64_t hvl_enqueue_inplace(hvl_prepared* prepared, uintptr_t data) {
  int64_t handle = 0;
  int32_t status = hvl::with_engine(
      [&](hvl::Engine* engine) { return hvl::enqueue_inplace(engine, *prepared, data, nullptr, &handle); });
  return hvl::outcome(status, handle);
}

int64_t hvl_enqueue_copied(hvl_prepared* prepared, uintptr_t data) {
  int64_t handle = 0;
  int32_t status =
      hvl::with_engine([&](hvl::Engine* engine) { return hvl::enqueue_copied(engine, *prepared, data, &handle); });
  return hvl::outcome(status, handle);
}

int64_t hvl_last_handle(void) { return hvl::last_handle; }

int64_t hvl_handle_in_flight(hvl_prepared* prepared) {
  int64_t handle = 0;
  hvl::with_engine([&](hvl::Engine* engine) {
    handle = engine->handle_in_flight(prepared->operation.get());
    return hvl::Status();
  });
  return handle;
}

int32_t hvl_enqueue_all(hvl_prepared* const* prepared, const uintptr_t* data, int32_t count, int64_t* handles) {
  std::fill_n(handles, count, 0);
  return hvl::with_engine(
      [&](hvl::Engine* engine) { return hvl::enqueue_all(engine, prepared, data, count, nullptr, handles); });
}

int32_t hvl_enqueue_all_on_stream(hvl_prepared* const* prepared, const uintptr_t* data, int32_t count, int64_t* handles,
                                  int32_t device, void* stream) {
  std::fill_n(handles, count, 0);
  return hvl::with_engine([&](hvl::Engine* engine) {
    hvl::GpuRequestPtr gpu;
    hvl::Status ready = engine->request_gpu(device, stream, &gpu);
    return ready.ok() ? hvl::enqueue_all(engine, prepared, data, count, gpu, handles) : ready;
  });
}

int32_t hvl_poll(int64_t handle) {
  hvl_status status = hvl::handle_table().poll(handle);
  if (status == HVL_UNKNOWN_HANDLE) return -hvl::report(hvl::finish(handle, status, nullptr, nullptr));
  if (status == HVL_OK) return 1;
  std::shared_ptr<hvl::Engine> running = hvl::engine();
  if (running != nullptr) running->request_flush();
  return 0;
}

int32_t hvl_wait(int64_t handle, double timeout, hvl_output** outputs, int32_t* num_outputs) {
  return hvl::guarded([&]() -> hvl::Status {
    if (outputs != nullptr) {
      *outputs = nullptr;
      *num_outputs = 0;
    }
    const uint64_t deadline = hvl::now_ns() + hvl::to_ns(timeout);
    hvl::wait(&handle, 1, deadline);
    return hvl::finish(handle, hvl::state_with_result(handle, deadline), outputs, num_outputs);
  });
}

int64_t hvl_send(uintptr_t data, int64_t num_bytes, int32_t dtype, int32_t peer, int64_t tag, int32_t process_set) {
  return hvl::post(true, data, num_bytes, dtype, peer, tag, process_set);
}

int64_t hvl_receive(uintptr_t data, int64_t num_bytes, int32_t dtype, int32_t peer, int64_t tag, int32_t process_set) {
  return hvl::post(false, data, num_bytes, dtype, peer, tag, process_set);
}

int32_t hvl_wait_message(int64_t handle, double timeout, hvl_received* received) {
  return hvl::guarded([&] {
    const uint64_t deadline = hvl::now_ns() + hvl::to_ns(timeout);
    hvl::wait(&handle, 1, deadline);
    return hvl::finish(handle, hvl::state_with_result(handle, deadline), nullptr, nullptr, received);
  });
}

int32_t hvl_wait_on_stream(int64_t handle, double timeout, hvl_output** outputs, int32_t* num_outputs, void* stream) {
  return hvl::guarded([&]() -> hvl::Status {
    if (outputs != nullptr) {
      *outputs = nullptr;
      *num_outputs = 0;
    }
    const uint64_t deadline = hvl::now_ns() + hvl::to_ns(timeout);
    hvl::wait(&handle, 1, deadline);
    const hvl_status state = hvl::handle_table().poll(handle);
    hvl::Status held = hvl::hold_up(&handle, state == HVL_OK ? 1 : 0, stream, deadline);
    if (hvl::leaves_handles(held)) return held;
    hvl::Status finished = hvl::finish(handle, state, outputs, num_outputs);
    return finished.ok() ? held : finished;
  });
}

int32_t hvl_try_wait(int64_t handle) {
  return hvl::guarded([&] { return hvl::finish(handle, hvl::state_with_result(handle, 0), nullptr, nullptr); });
}

int32_t hvl_wait_until_complete(int64_t handle, double timeout) {
  return hvl::guarded([&]() -> hvl::Status {
    hvl_status state = hvl::handle_table().poll(handle);
    if (state == HVL_IN_PROGRESS) state = hvl::wait(&handle, 1, hvl::now_ns() + hvl::to_ns(timeout));
    if (state == HVL_UNKNOWN_HANDLE) return hvl::finish(handle, state, nullptr, nullptr);
    return state == HVL_IN_PROGRESS ? hvl::unfinished() : hvl::Status();
  });
}

int32_t hvl_take_copy(int64_t handle, uintptr_t result) {
  return hvl::guarded([&] {
    hvl::Status status;
    const hvl_status state = hvl::handle_table().take_copy(handle, reinterpret_cast<char*>(result), &status);
    return state == HVL_OK ? status : hvl::finish(handle, state, nullptr, nullptr);
  });
}

int32_t hvl_wait_all(int64_t* handles, int32_t count, double timeout) {
  return hvl::guarded([&]() -> hvl::Status {
    const uint64_t deadline = hvl::now_ns() + hvl::to_ns(timeout);
    const size_t num_handles = static_cast<size_t>(count);
    hvl::HandleTable& table = hvl::handle_table();
    if (hvl::wait(handles, num_handles, deadline) != HVL_OK ||
        table.wait_for_results(handles, num_handles, deadline, hvl::engine() != nullptr) != HVL_OK) {
      return hvl::unfinished();
    }
    return table.consume_all(handles, num_handles);
  });
}

int32_t hvl_wait_all_on_stream(int64_t* handles, int32_t count, double timeout, void* stream) {
  return hvl::guarded([&]() -> hvl::Status {
    const uint64_t deadline = hvl::now_ns() + hvl::to_ns(timeout);
    const size_t num_handles = static_cast<size_t>(count);
    if (hvl::wait(handles, num_handles, deadline) != HVL_OK) return hvl::unfinished();
    hvl::Status held = hvl::hold_up(handles, num_handles, stream, deadline);
    if (hvl::leaves_handles(held)) return held;
    hvl::Status finished = hvl::handle_table().consume_all(handles, num_handles);
    return finished.ok() ? held : finished;
  });
}

void hvl_free(void* data) { free(data); }

void* hvl_place_output(void* context, int32_t index, const hvl_output* output) {
  hvl_output* place = static_cast<hvl_output*>(context) + index;
  if (place->num_bytes != output->num_bytes) {
    *place = *output;
    place->data = malloc(static_cast<size_t>(output->num_bytes) + 1);  // + 1: not null when empty
  }
  return output->num_bytes > 0 ? place->data : context;  // null would mean that there is no memory
}

}  // extern "C"
