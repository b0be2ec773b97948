// A communicator of NCCL: the members of one process set, each with its GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/gpu.h"
#include "nccl/nccl_api.h"
#include "nccl/nccl_plan.h"

namespace hvl {

// Only the thread that holds the engine lock may use it, with the GPU's context current. NCCL does not block here:
// after start() and launch(), call poll() until it is done, and nothing else before that.
class NcclCommunicator {
 public:
  NcclCommunicator(const NcclApi& nccl, CudaStream stream) : nccl_(nccl), stream_(stream) {}
  // A communicator that is neither finished nor aborted is leaked: ending it may take long, see abort_all().
  ~NcclCommunicator() = default;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  Status start(const NcclUniqueId& id, int size, int place);
  // Calls NCCL's functions as one group, so that they are one launch. `reductions`: those that the calls use.
  Status launch(const std::vector<NcclReduction>& reductions, const std::function<void()>& calls);
  // Sets *done if NCCL is done with the last call. An error: NCCL has failed, in the call or on the device.
  Status poll(bool* done);
  // Aborts the work on the device, independently of the other members. Nothing may be called afterwards. Blocks.
  void abort();
  // Frees the communicator, without waiting: call it again until *done is set. An error: it can only be aborted.
  Status finish(bool* done);

  // Only for calls within launch(). Counts are in elements.
  void all_reduce(const void* from, void* to, uint64_t count, const NcclReduction& reduction);
  void reduce(const void* from, void* to, uint64_t count, const NcclReduction& reduction, int root);
  void reduce_scatter(const void* from, void* to, uint64_t count_received, const NcclReduction& reduction);
  void broadcast(const void* from, void* to, uint64_t num_bytes, int root);
  void all_gather(const void* from, void* to, uint64_t bytes_sent);
  void send(const void* from, uint64_t num_bytes, int peer);
  void receive(void* to, uint64_t num_bytes, int peer);

 private:
  void note(NcclResult result);
  void make_op(const NcclReduction& plan);
  void destroy_ops();
  NcclRedOp op_of(const NcclReduction& plan) const;
  Status failed(const char* what, NcclResult result) const;

  const NcclApi nccl_;
  const CudaStream stream_;
  NcclComm comm_ = nullptr;
  bool is_finalizing_ = false;
  NcclResult first_error_ = kNcclSuccess;  // the launch's
  // PreMulSum operations of this communicator, by dtype and the bits of the factor.
  std::map<std::pair<NcclDataType, uint64_t>, NcclRedOp> scaled_;
};

// Aborts all communicators at once, in separate threads: freeing one may wait for all work of the device, so also for
// another one that must be aborted, and for work of others. False: some have not ended in time, and continue.
bool abort_all(const std::shared_ptr<Gpu>& gpu, std::vector<std::unique_ptr<NcclCommunicator>> communicators,
               uint64_t timeout);

}  // namespace hvl
