// The data plane of tensors on GPUs: NCCL where it can do it, else the data plane of the CPU through the host's memory.
//
// Its functions return when all work has been given to the device, which does it in the order of the log on a stream of
// the engine. From then on the work on the device is watched until it is done.
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

// For the thread that holds the engine lock.
class NcclDataPlane : public DataPlane {
 public:
  // `cpu` runs collectives through the host's memory, and exchanges the introductions of a team's members. `size`: of
  // the job.
  NcclDataPlane(const GpuOptions& options, std::shared_ptr<Gpu> gpu, DataPlane* cpu, Waiter* waiter, int local_rank,
                int size);
  ~NcclDataPlane() override;
  NcclDataPlane(const NcclDataPlane&) = delete;
  NcclDataPlane& operator=(const NcclDataPlane&) = delete;
  // The name of the tensor with this input, in the collective under way; null: of the first one.
  using NameOf = std::function<std::string(const char* input)>;
  // Must be called before anything else.
  Status open(NameOf name_of);

  // Must be told what each collective waits for.
  EngineStream& stream() { return stream_; }

  void begin(TeamPtr team, uint64_t number) override;
  Status allreduce(const Batch& batch, const FinalBytes& final_bytes) override;
  Status reduce_to(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status allgather(const Gather& gather) override;
  Status reducescatter(const Scatter& scatter) override;
  Status alltoall(const Exchange& exchange) override;
  // Runs `work` on the host, in place on a copy of the batch, which is then copied to the batch's outputs. First
  // prepare_on_host() sets *host to the location of that copy, which is complete when `work` is called.
  Status prepare_on_host(const Batch& batch, Batch* host, std::function<Status(DataPlane*)> work);
  Status on_host();

  // check() watches the work on the device: call it now and then while is_busy(). An error breaks the job.
  bool is_busy() const { return stream_.is_working() || teams_.has_retired(); }
  Status check();
  // No collective of this team comes any more.
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
  // `reduce`: NCCL's function. The segments that NCCL cannot reduce are in staged_ then.
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
  TeamPtr team_;
  Stage stage_ = Stage::kAgree;
  Batch staged_;  // that part of a batch which NCCL cannot reduce
};

}  // namespace hvl
