// The agreement of one team's members on whether they use NCCL together; if so, their communicator.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collective/data_plane.h"
#include "cuda/gpu_access.h"
#include "nccl/nccl_communicator.h"
#include "sync/waiter.h"

namespace hvl {

// The context that the agreements of all teams share.
struct NcclContext {
  GpuOperations operations;
  std::shared_ptr<Gpu> gpu;
  DataPlane* cpu;  // exchanges the members' introductions
  Waiter* waiter;
  int size;  // ranks in the job
  CudaStream stream = nullptr;
  std::optional<NcclApi> nccl{};
  std::string why_no_nccl{};
};

// Only the thread that holds the engine lock may use it, with the GPU's context current.
class NcclAgreement {
 public:
  // `team`: if null, the members do not use NCCL, and do not negotiate about it.
  NcclAgreement(const NcclContext* context, TeamPtr team)
      : context_(*context), team_(std::move(team)), state_(team_ == nullptr ? State::kReady : State::kNew) {}

  // Call it before each collective of the team. HVL_IN_PROGRESS: interrupted; the next call continues.
  Status agree();
  // Null: they do not use NCCL.
  NcclCommunicator* communicator() const { return communicator_.get(); }
  std::unique_ptr<NcclCommunicator> take_communicator() { return std::move(communicator_); }
  // As NcclCommunicator::launch().
  Status launch(const std::vector<NcclReduction>& reductions, const std::function<void(NcclCommunicator*)>& calls);
  // Waits until NCCL has given the work of launch() to the device, for which it may need the other members.
  Status settle();

 private:
  enum class State { kNew, kIntroducing, kNaming, kConnecting, kReady };

  void introduce();
  Status choose();
  void name();
  Status wait_for_nccl();
  std::string others() const;

  const NcclContext& context_;
  const TeamPtr team_;
  State state_;
  std::vector<Introduction> introductions_;  // this rank's, then all members'
  Gather exchange_;
  Batch naming_;                                    // the first member's introduction, with the id
  std::unique_ptr<NcclCommunicator> communicator_;  // null: they do not use NCCL
  bool has_launched_ = false;
};

}  // namespace hvl
