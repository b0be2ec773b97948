// The data plane of tensors on GPUs: NCCL where it can do it, else the data plane of the CPU through the host's memory.
//
// Its functions return when all work has been given to the device, which does it in the order of the log on a stream of
// the engine. From then on the work on the device is watched until it is done.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "collective/data_plane.h"
#include "cuda/gpu_access.h"
#include "cuda/staging.h"
#include "nccl/nccl_communicator.h"
#include "sync/waiter.h"

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

  void begin(TeamPtr team, uint64_t number) override;
  // Sets the name of the collective for stall reports: "the allreduce of 'x'".
  void set_name(std::string name) { name_ = std::move(name); }
  // The device begins the work that follows only after the work that the request's stream had been given at its
  // enqueue, or until now: the latter is for memory that was allocated since.
  Status hold_until_ready(const GpuRequest& request);
  Status hold_until_now(const GpuRequest& request);

  Status allreduce(const Batch& batch, const FinalBytes& final_bytes) override;
  Status broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status allgather(const Gather& gather) override;
  Status reducescatter(const Scatter& scatter) override;
  Status alltoall(const Exchange& exchange) override;
  // Runs `work` on the host, in place on a copy of the batch, which is then copied to the batch's outputs. First
  // prepare_on_host() sets *host to the location of that copy, which is complete when `work` is called.
  Status prepare_on_host(const Batch& batch, Batch* host, std::function<Status(DataPlane*)> work);
  Status on_host();

  // The result of the collective since begin(): null if the device has nothing to do for it.
  const GpuResultPtr& result() const { return result_; }

  // check() watches the work on the device: call it now and then while is_busy(). An error breaks the job.
  bool is_busy() const { return !in_flight_.empty() || !retired_.empty(); }
  bool is_working() const { return !in_flight_.empty(); }  // at collectives
  Status check();
  // No collective of this team comes any more.
  void forget(const TeamPtr& team);
  // close(): the job ends, and the device has no work. abort(): the job is broken; ends the work on the device, whose
  // results fail.
  void close();
  void abort(const Status& why);

 private:
  enum class Stage { kAgree, kStart, kSettle, kStaged };

  // The members of a team, which use NCCL together, or do not.
  struct Members {
    enum class State { kNew, kIntroducing, kNaming, kConnecting, kReady };

    TeamPtr team;
    State state = State::kNew;
    std::vector<Introduction> introductions;  // mine, then all
    Gather exchange;
    Batch naming;                                    // the first one's introduction, with the id
    std::unique_ptr<NcclCommunicator> communicator;  // null: they do not
  };
  struct InFlight {
    GpuResultPtr result;
    std::shared_ptr<PinnedMemory> memory;  // the device may still copy from it
    std::string name;
    std::vector<GpuEventPtr> ready;  // the events of its callers' streams that it waits for
  };

  Status run(const std::function<Status()>& start);
  Status agree();
  void introduce(Members* members);
  Status choose(Members* members);
  void name(Members* members);
  Status settle(NcclCommunicator* communicator);
  Status note_result();
  Status launch(const std::vector<NcclReduction>& reductions, const std::function<void(NcclCommunicator*)>& calls);
  bool uses_nccl() const { return members_ != nullptr && members_->communicator != nullptr; }
  bool uses_nccl_otherwise() const;
  NcclReduction plan_for(const Reduction& reduction, const char* input);
  void warn_staged(const char* why, const char* input = nullptr);
  Status start_allreduce(const Batch& batch);
  Status check_stall();
  Stall describe_stall() const;
  void finish_retired();
  void retire_all();
  void abort_communicators();
  bool drain();
  std::string others() const;
  Status broken(const Status& status) const;
  std::string who() const;  // this rank and its GPU

  const GpuOptions options_;
  const std::shared_ptr<Gpu> gpu_;
  DataPlane* const cpu_;
  Waiter* const waiter_;
  const int local_rank_;
  const int size_;
  CudaStream stream_ = nullptr;
  std::optional<NcclApi> nccl_;
  std::string why_no_nccl_;
  NameOf name_of_;
  std::set<std::string> staged_for_;  // the reasons already warned of
  std::unique_ptr<Staging> staging_;

  std::map<const Team*, std::unique_ptr<Members>> all_members_;
  std::vector<std::unique_ptr<NcclCommunicator>> retired_;  // no longer used
  std::deque<InFlight> in_flight_;                          // in the order of the stream
  uint64_t progressed_at_ = 0;                              // when the first of them became the first
  bool warned_ = false;                                     // that it makes no progress
  bool is_stuck_ = false;                                   // a communicator could not be aborted in time

  // The collective under way.
  TeamPtr team_;
  Members* members_ = nullptr;  // null: a rank of the process set takes no part, so NCCL is not used
  Stage stage_ = Stage::kAgree;
  bool has_launched_ = false;
  Batch staged_;  // that part of a batch which NCCL cannot reduce
  std::string name_;
  std::vector<GpuEventPtr> ready_;  // of its requests, unless the one before waits for it, too
  GpuEventPtr last_ready_;
  GpuResultPtr result_;
};

}  // namespace hvl
