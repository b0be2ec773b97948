// The data plane of tensors on GPUs: NCCL where it can do it, else the data plane of the CPU through the host's memory.
//
// Its functions return when all has been given to the device, which does it in the order of the log on a stream of the
// engine's. What the device is doing is watched from then on, until it is done.
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

// For who holds the engine lock.
class NcclDataPlane : public DataPlane {
 public:
  // `cpu` does what goes through the host's memory, and introduces the members of a team to each other.
  // `size`: of the job.
  NcclDataPlane(const GpuOptions& options, std::shared_ptr<Gpu> gpu, DataPlane* cpu, Waiter* waiter, int local_rank,
                int size);
  ~NcclDataPlane() override;
  NcclDataPlane(const NcclDataPlane&) = delete;
  NcclDataPlane& operator=(const NcclDataPlane&) = delete;
  // The name of the tensor with this input, in the collective under way; null: of the first one.
  using NameOf = std::function<std::string(const char* input)>;
  // Before anything else.
  Status open(NameOf name_of);

  void begin(TeamPtr team, uint64_t number) override;
  // What the collective is called where it does not get on: "the allreduce of 'x'".
  void set_name(std::string name) { name_ = std::move(name); }
  // The device begins with what follows only after what the request's stream had been given at its enqueue, or until
  // now: that is for memory which has been allocated since.
  Status hold_until_ready(const GpuRequest& request);
  Status hold_until_now(const GpuRequest& request);

  Status allreduce(const Batch& batch, const FinalBytes& final_bytes) override;
  Status broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status allgather(const Gather& gather) override;
  Status reducescatter(const Scatter& scatter) override;
  Status alltoall(const Exchange& exchange) override;
  // Has `work` done on the host, in place on a copy of the batch, which is then copied to the batch's outputs. First
  // prepare_on_host() tells where that copy is going to be; it is there when `work` is called.
  Status prepare_on_host(const Batch& batch, Batch* host, std::function<Status(DataPlane*)> work);
  Status on_host();

  // What has been done since begin(): null if the device has nothing to do for it.
  const GpuResultPtr& result() const { return result_; }

  // Looks after what the device is doing: call it now and then while it is busy. An error breaks the job.
  bool is_busy() const { return !in_flight_.empty() || !retired_.empty(); }
  bool is_working() const { return !in_flight_.empty(); }  // at collectives
  Status check();
  // No collective of this team comes any more.
  void forget(const TeamPtr& team);
  // The job ends, and the device works at nothing. Or it is broken: ends what the device is doing, whose results fail.
  void close();
  void abort(const Status& why);

 private:
  enum class Stage { kAgree, kStart, kSettle, kStaged };

  // Those who use NCCL together, or not.
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
    std::shared_ptr<PinnedMemory> memory;  // what it may still copy from
    std::string name;
    std::vector<GpuEventPtr> ready;  // what it waits for of its callers' streams
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
  std::set<std::string> staged_for_;  // the reasons that were warned of
  std::unique_ptr<Staging> staging_;

  std::map<const Team*, std::unique_ptr<Members>> all_members_;
  std::vector<std::unique_ptr<NcclCommunicator>> retired_;  // that nobody uses any more
  std::deque<InFlight> in_flight_;                          // in the order of the stream
  uint64_t progressed_at_ = 0;                              // when the first of them became that
  bool warned_ = false;                                     // that it does not get on
  bool is_stuck_ = false;                                   // a communicator could not be aborted in time

  // The collective under way.
  TeamPtr team_;
  Members* members_ = nullptr;  // null: somebody of the process set takes no part, so NCCL is not used
  Stage stage_ = Stage::kAgree;
  bool has_launched_ = false;
  Batch staged_;  // that part of a batch which NCCL cannot reduce
  std::string name_;
  std::vector<GpuEventPtr> ready_;  // of its requests, unless the one before waits for it, too
  GpuEventPtr last_ready_;
  GpuResultPtr result_;
};

}  // namespace hvl
