// The data plane of tensors on GPUs: NCCL where possible, else the data plane of the CPU through the host's memory.
//
// Its functions return when all work has been given to the device, which does it in the order of the log on a stream of
// the engine. After that, check() watches the work until it is done.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>

#include "collective/data_plane.h"
#include "cuda/engine_stream.h"
#include "cuda/staging.h"
#include "nccl/nccl_teams.h"

namespace hvl {

// Only the thread that holds the engine lock may use it.
class NcclDataPlane : public DataPlane {
 public:
  // `cpu` runs collectives through the host's memory, and exchanges the introductions of a team's members. `size`: the
  // number of ranks in the job.
  NcclDataPlane(const GpuOptions& options, std::shared_ptr<Gpu> gpu, DataPlane* cpu, Waiter* waiter, int local_rank,
                int size);
  ~NcclDataPlane() override;
  NcclDataPlane(const NcclDataPlane&) = delete;
  NcclDataPlane& operator=(const NcclDataPlane&) = delete;
  // Returns the name of the tensor with this input in the collective under way; null: the name of its first tensor.
  using NameOf = std::function<std::string(const char* input)>;
  // Must be called before anything else.
  Status open(NameOf name_of);

  // Tell it which requests' streams each collective must wait for: see EngineStream::hold_until_ready().
  EngineStream& stream() { return stream_; }

  // False: the following collectives go through the host's memory. Call it before begin().
  void allow_nccl(bool allowed) { allows_nccl_ = allowed; }
  void begin(TeamPtr team, uint64_t number) override;
  Status allreduce(const Batch& batch, const FinalBytes& final_bytes) override;
  Status reduce_to(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status allgather(const Gather& gather) override;
  Status reducescatter(const Scatter& scatter) override;
  Status alltoall(const Exchange& exchange) override;
  // HVL_STAGING: at least a part of the collective goes through the host's memory.
  hvl_transport transport() const override { return uses_nccl() && !is_staged_ ? HVL_NCCL : HVL_STAGING; }
  // on_host() runs `work` in place on a copy of the batch in host memory, and copies the result to the batch's outputs.
  // Call prepare_on_host() first: it sets *host to that copy, which has its data only when `work` is called.
  Status prepare_on_host(const Batch& batch, Batch* host, std::function<Status(DataPlane*)> work);
  Status on_host();

  // check() watches the work on the device: call it periodically while is_busy(). An error breaks the job.
  bool is_busy() const { return stream_.is_working() || teams_.has_retired(); }
  Status check();
  // Releases the resources of a team that will have no more collectives.
  void forget(const TeamPtr& team) { teams_.forget(team); }
  // close(): the job ends, and the device has no work. abort(): the job is broken; ends the work on the device, whose
  // results fail.
  void close() { teams_.close(); }
  void abort(const Status& why);

 private:
  enum class Stage { kAgree, kStart, kSettle, kStaged };

  Status run(const std::function<Status()>& start);
  bool uses_nccl() const { return teams_.communicator() != nullptr; }
  NcclReduction plan_for(const Reduction& reduction, const char* input);
  void warn_staged(const char* why, const char* input = nullptr);
  using Reduce = std::function<void(NcclCommunicator*, const Segment&, uint64_t count, const NcclReduction&)>;
  // `reduce`: calls NCCL's function. Collects the segments that NCCL cannot reduce in staged_.
  Status start_reduction(const Batch& batch, const Reduce& reduce);

  const GpuOptions options_;
  const std::shared_ptr<Gpu> gpu_;
  DataPlane* const cpu_;
  Waiter* const waiter_;
  EngineStream stream_;
  NcclTeams teams_;
  std::unique_ptr<Staging> staging_;
  NameOf name_of_;
  std::set<std::string> staged_for_;  // the reasons already warned of

  // The collective under way.
  bool allows_nccl_ = true;
  TeamPtr team_;
  Stage stage_ = Stage::kAgree;
  Batch staged_;            // the part of a batch that NCCL cannot reduce
  bool is_staged_ = false;  // although the members use NCCL
};

}  // namespace hvl
