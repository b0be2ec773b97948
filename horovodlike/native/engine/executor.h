// Runs the collectives that the log asks for, one at a time: makes the batch or the group, moves the data, completes
// the requests. Only the holder of the engine lock may use it.
#pragma once

#include <vector>

#include "collective/adasum.h"
#include "engine/collective_reporter.h"
#include "engine/gpu_executor.h"
#include "engine/request_table.h"
#include "engine/tuning_observer.h"
#include "observe/fault_injection.h"

namespace hvl {

class Executor {
 public:
  Executor(EngineContext* context, RequestTable* requests, CollectiveReporter* reporter, TuningObserver* tuner,
           GpuExecutor* gpu)
      : context_(*context), requests_(*requests), reporter_(*reporter), tuner_(*tuner), gpu_(*gpu) {}

  // Starts *collective, and swaps it with the previous one, so that its memory is reused. `definition`: its first
  // tensor's. If the collective is interrupted, or is one for the engine's own thread, is_running() is true, and the
  // next holder of the engine lock calls resume().
  Status start(Collective* collective, const Definition& definition);
  Status resume();
  bool is_running() const { return is_running_; }
  // True if only the engine's own thread may call resume().
  bool needs_engine_thread() const { return is_running_ && !is_on_gpu_ && cpu_plane_ == context_.external_plane.get(); }
  bool has_failed() const { return has_failed_; }  // the last collective
  // Completes a join, or the addition of a process set, with its output: `number`.
  Status complete_with(NamedTensor* tensor, int64_t number);
  // Drops the collective under way. Called when the job has ended and all requests are complete.
  void end();

  Fault& fault() { return fault_; }

 private:
  // Allreduce, reduce and broadcast: the memory of the tensors as one stream of bytes. A barrier has none.
  struct BatchProgress {
    Batch batch;
    std::vector<uint64_t> ends;  // the end of each request in the stream
    size_t num_completed = 0;    // requests
  };
  // All other collectives: the tensors of a group are executed one after the other.
  struct GroupProgress {
    std::vector<Gather> gathers;      // one for each tensor of an allgather
    std::vector<Scatter> scatters;    // one for each tensor of a reducescatter
    std::vector<Exchange> exchanges;  // one for each tensor of an alltoall, gather or scatter
    size_t num_done = 0;              // tensors
  };

  DataPlane* plane() const { return is_on_gpu_ ? gpu_.plane() : cpu_plane_; }
  Status prepare(const Definition& definition);
  Status prepare_adasum();
  Status prepare_allgather(const Definition& definition);
  Status prepare_gather(const Definition& definition);
  Status prepare_alltoall(const Definition& definition);
  Status prepare_exchange(const Definition& definition, size_t tensor);
  void prepare_batch();
  void prepare_reducescatter();
  void prepare_scatter();
  Reduction reduction_of(const Signature& signature, size_t tensor) const;
  Status allocate(const PendingRequest& request, size_t index, const TensorSignature& described, int64_t rows,
                  char** data);
  Status resume_batch();
  Status resume_group();
  Status resume_adasum();
  void complete(NamedTensor* tensor, std::vector<hvl_output> outputs = {});

  EngineContext& context_;
  RequestTable& requests_;
  CollectiveReporter& reporter_;
  TuningObserver& tuner_;
  GpuExecutor& gpu_;
  Fault fault_;
  Collective collective_;
  bool is_running_ = false;
  bool has_failed_ = false;
  bool is_on_gpu_ = false;
  DataPlane* cpu_plane_ = nullptr;  // runs the collective, if it is not on a GPU
  BatchProgress batch_;
  GroupProgress group_;
  Adasum adasum_;
  std::vector<hvl_output> outputs_;  // allocated by the engine for the collective under way
};

}  // namespace hvl
