// A job of threads whose ranks have a GPU each, of the double in fake_gpu/.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fake_gpu.h"
#include "job_of_threads.h"

namespace hvl {

inline EngineOptions on_double(GpuOperations operations = GpuOperations::kAuto, uint64_t staging_bytes = 4096) {
  EngineOptions options;
  options.gpu.cuda_library = FAKE_GPU;
  options.gpu.nccl_library = FAKE_GPU;
  options.gpu.operations = operations;
  options.gpu.staging_bytes = staging_bytes;
  return options;
}

// Memory of a GPU that an operation has for its outputs, where the engine knows their sizes.
struct Allocated {
  std::vector<std::vector<char>> outputs;

  hvl_callbacks callbacks() {
    hvl_callbacks made{};
    made.allocate = [](void* context, int32_t, const hvl_output* output) -> void* {
      auto& outputs = static_cast<Allocated*>(context)->outputs;
      outputs.emplace_back(static_cast<size_t>(output->num_bytes) + 1);
      return outputs.back().data();
    };
    made.context = this;
    return made;
  }
};

// Checks in the end that nothing was done that real libraries would not allow, and that nothing is left. Rank r has GPU
// r, and a stream of its own.
class GpuJob {
 public:
  // prepare: changes the double before the engines start.
  explicit GpuJob(int size, EngineOptions options = on_double(), const std::function<void()>& prepare = [] {}) {
    fake_gpu::reset(size);
    prepare();
    for (int rank = 0; rank < size; ++rank) streams_.push_back(fake_gpu::make_stream(rank));
    job_ = std::make_unique<Job>(size, options);
  }

  ~GpuJob() {
    for (void* stream : streams_) fake_gpu::release(stream);
    job_ = nullptr;
    CHECK_EQ(fake_gpu::violations(), "");
    CHECK_EQ(fake_gpu::num_communicators(), 0);
    CHECK_EQ(fake_gpu::num_streams(), 0);
    CHECK_EQ(fake_gpu::num_pinned(), 0);
    CHECK_EQ(fake_gpu::num_contexts(), 0);
  }

  Job& job() { return *job_; }
  void* stream(int rank) { return streams_[static_cast<size_t>(rank)]; }

  // Of operations on the CPU, too, which have no stream.
  int64_t enqueue(int rank, const std::shared_ptr<Operation>& operation, const std::vector<const char*>& inputs,
                  const std::vector<char*>& outputs, const hvl_callbacks& callbacks = {}) {
    auto request = std::make_unique<PendingRequest>();
    request->operation = operation;
    request->callbacks = callbacks;
    for (size_t t = 0; t < inputs.size(); ++t) {
      Memory memory{inputs[t], outputs.empty() ? nullptr : outputs[t]};
      if (t == 0) request->memory = memory;
      if (t > 0) request->more.push_back(memory);
    }
    Engine& engine = job_->engine(rank);
    if (operation->signature.device == HVL_CUDA) {
      CHECK_EQ(engine.request_gpu(rank, stream(rank), &request->gpu).message(), "");
    }
    int64_t handle = 0;
    CHECK_EQ(engine.enqueue(std::move(request), &handle).message(), "");
    engine.notify();
    return handle;
  }

  // On the host, until the result is there.
  Status wait(int rank, int64_t handle) {
    job_->wait_only(rank, handle);
    HandleTable& table = job_->handles(rank);
    CHECK_EQ(table.wait_for_results(&handle, 1, now_ns() + kPatience), HVL_OK);
    std::vector<hvl_output> outputs;
    Status status = table.consume(handle, &outputs);
    for (const hvl_output& output : outputs) free(output.data);
    return status;
  }

  Status run(int rank, const std::shared_ptr<Operation>& operation, void* data) {
    return wait(rank, enqueue(rank, operation, {static_cast<char*>(data)}, {static_cast<char*>(data)}));
  }

 private:
  std::vector<void*> streams_;
  std::unique_ptr<Job> job_;
};

inline std::shared_ptr<Operation> on_gpu(std::shared_ptr<Operation> operation) {
  if (has_tensors(operation->signature.kind)) operation->signature.device = HVL_CUDA;
  return operation;
}

}  // namespace hvl
