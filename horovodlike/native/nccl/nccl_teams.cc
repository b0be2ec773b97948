#include "nccl/nccl_teams.h"

#include <algorithm>
#include <utility>

#include "cuda/engine_stream.h"

namespace hvl {

void NcclTeams::open(const std::string& library, CudaStream stream) {
  context_.stream = stream;
  if (context_.operations == GpuOperations::kStaging) return;
  NcclApi nccl{};
  const Status status = NcclApi::load(library, &nccl);
  if (status.ok()) context_.nccl = nccl;
  context_.why_no_nccl = status.message();
}

void NcclTeams::begin(const TeamPtr& team, bool allows_nccl) {
  current_ = &none_;
  if (!team->is_whole || !allows_nccl) return;
  std::unique_ptr<NcclAgreement>& agreement = by_team_[team.get()];
  if (agreement == nullptr) agreement = std::make_unique<NcclAgreement>(&context_, team);
  current_ = agreement.get();
}

bool NcclTeams::use_nccl() const {
  return std::any_of(by_team_.begin(), by_team_.end(),
                     [](const auto& each) { return each.second->communicator() != nullptr; });
}

Status NcclTeams::check() const {
  Status status;
  bool done = false;
  for (const auto& [team, agreement] : by_team_) {
    if (status.ok() && agreement->communicator() != nullptr) status = agreement->communicator()->poll(&done);
  }
  return status;
}

void NcclTeams::forget(const TeamPtr& team) {
  const auto found = by_team_.find(team.get());
  if (found == by_team_.end()) return;
  if (found->second->communicator() != nullptr) retired_.push_back(found->second->take_communicator());
  by_team_.erase(found);
  current_ = &none_;
}

void NcclTeams::finish_retired() {
  std::vector<std::unique_ptr<NcclCommunicator>> unfinished;
  std::vector<std::unique_ptr<NcclCommunicator>> failed;
  for (std::unique_ptr<NcclCommunicator>& communicator : retired_) {
    bool done = false;
    const Status status = communicator->finish(&done);
    if (!done) (status.ok() ? unfinished : failed).push_back(std::move(communicator));
  }
  retired_ = std::move(unfinished);
  if (!failed.empty()) abort_all(context_.gpu, std::move(failed), 0);
}

void NcclTeams::retire_all() {
  for (auto& [team, agreement] : by_team_) {
    if (agreement->communicator() != nullptr) retired_.push_back(agreement->take_communicator());
  }
  by_team_.clear();
  current_ = &none_;
}

void NcclTeams::close() {
  retire_all();
  poll_until([&] {
    const Gpu::Current current(*context_.gpu);
    finish_retired();
    return retired_.empty();
  });
  abort();  // the remaining ones
}

bool NcclTeams::abort() {
  retire_all();
  const bool have_ended = retired_.empty() || abort_all(context_.gpu, std::move(retired_), kLeaveTimeout);
  retired_.clear();
  is_stuck_ |= !have_ended;
  return !is_stuck_;
}

}  // namespace hvl
