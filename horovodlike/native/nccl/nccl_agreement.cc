#include "nccl/nccl_agreement.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "negotiate/rank_set.h"

namespace hvl {

namespace {

void refuse(const std::string& why_not, Introduction* introduction) {
  introduction->nccl_version = 0;
  memcpy(introduction->why_no_nccl, why_not.data(), std::min(why_not.size(), sizeof introduction->why_no_nccl));
}

}  // namespace

Status NcclAgreement::agree() {
  if (state_ == State::kReady) return Status();
  Status status;
  if (state_ == State::kNew) introduce();
  if (state_ == State::kIntroducing) {
    status = context_.cpu->allgather(exchange_);
    if (status.ok()) status = choose();
  }
  if (status.ok() && state_ == State::kNaming) {
    status = context_.cpu->broadcast(naming_, 0, [](uint64_t) {});
    if (status.ok()) status = choose();
  }
  if (status.ok() && state_ == State::kConnecting) {
    status = wait_for_nccl();
    if (status.ok()) state_ = State::kReady;
  }
  return status;
}

void NcclAgreement::introduce() {
  Introduction mine{};
  mine.gpu = context_.gpu->uuid();
  mine.operations = static_cast<int32_t>(context_.operations);
  if (context_.nccl.has_value()) {
    mine.nccl_version = context_.nccl->version();
  } else {
    refuse(context_.why_no_nccl, &mine);
  }
  introductions_.assign(1 + team_->size(), Introduction());
  introductions_[0] = mine;
  char* next = reinterpret_cast<char*>(introductions_.data());
  exchange_ = Gather{next, {}};
  for (size_t place = 0; place < team_->size(); ++place) {
    exchange_.blocks.push_back({next += sizeof(Introduction), sizeof(Introduction)});
  }
  state_ = State::kIntroducing;
}

// Chooses the transport by the introductions. With NCCL this is done twice: before and after the first member has made
// the id of a communicator, or has failed to.
Status NcclAgreement::choose() {
  const bool is_named = state_ == State::kNaming;
  const std::vector<Introduction> introductions(introductions_.begin() + 1, introductions_.end());
  const TransportChoice choice = choose_transport(introductions, team_->ranks);
  // A smaller team may leave GPUs to ranks outside of it.
  if (!is_named && team_->size() == static_cast<size_t>(context_.size)) {
    const std::string advice = advise_on_placement(introductions, team_->ranks, team_->mine, context_.gpu->visible());
    if (!advice.empty()) log(LogLevel::kWarning, advice);
  }
  if (!choice.uses_nccl) {
    if (context_.operations == GpuOperations::kNccl) {
      return Status(HVL_JOB_BROKEN, "HOROVODLIKE_GPU_OPERATIONS=nccl cannot be followed: " + choice.reason);
    }
    const LogLevel level = context_.operations == GpuOperations::kStaging ? LogLevel::kDebug : LogLevel::kWarning;
    if (team_->mine == 0) log(level, "tensors on GPUs go through the memory of the host: " + choice.reason);
    state_ = State::kReady;
    return Status();
  }
  if (!is_named) {
    name();
    return Status();
  }
  communicator_ = std::make_unique<NcclCommunicator>(*context_.nccl, context_.stream);
  state_ = State::kConnecting;
  return communicator_->start(introductions[0].id, static_cast<int>(team_->size()), static_cast<int>(team_->mine));
}

// NCCL listens for the members from the moment that it makes an id, so an id is made only if it will be used.
void NcclAgreement::name() {
  Introduction* first = &introductions_[1];
  if (team_->mine == 0) {
    const NcclResult result = context_.nccl->ncclGetUniqueId(&first->id);
    if (result != kNcclSuccess) refuse(context_.nccl->describe(result, nullptr), first);
  }
  char* memory = reinterpret_cast<char*>(first);
  naming_.add(memory, memory, sizeof *first, Reduction());
  state_ = State::kNaming;
}

Status NcclAgreement::launch(const std::vector<NcclReduction>& reductions,
                             const std::function<void(NcclCommunicator*)>& calls) {
  has_launched_ = true;
  return communicator_->launch(reductions, [&] { calls(communicator_.get()); });
}

Status NcclAgreement::settle() {
  const Status status = has_launched_ ? wait_for_nccl() : Status();
  if (status.ok()) has_launched_ = false;
  return status;
}

Status NcclAgreement::wait_for_nccl() {
  Status failure;
  const auto is_over = [&] {
    bool done = false;
    if (failure.ok()) failure = communicator_->poll(&done);
    return done || !failure.ok();
  };
  Status status = context_.waiter->wait_polling(is_over, [this] { return others(); });
  return failure.ok() ? status : failure;
}

std::string NcclAgreement::others() const {
  std::vector<int> ranks = team_->ranks;
  ranks.erase(ranks.begin() + static_cast<std::ptrdiff_t>(team_->mine));
  if (ranks.empty()) return "NCCL";
  return (ranks.size() > 1 ? "one of " : "") + text_of_ranks(ranks);
}

}  // namespace hvl
