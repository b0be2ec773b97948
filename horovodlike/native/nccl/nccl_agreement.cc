// The part of the data plane in which the members of a process set agree on whether they use NCCL.

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/log.h"
#include "nccl/nccl_data_plane.h"
#include "negotiate/rank_set.h"

namespace hvl {

namespace {

void refuse(const std::string& why_not, Introduction* introduction) {
  introduction->nccl_version = 0;
  memcpy(introduction->why_no_nccl, why_not.data(), std::min(why_not.size(), sizeof introduction->why_no_nccl));
}

}  // namespace

// Before the members of a process set do something together for the first time.
Status NcclDataPlane::agree() {
  if (members_ == nullptr || members_->state == Members::State::kReady) return Status();
  Status status;
  if (members_->state == Members::State::kNew) introduce(members_);
  if (members_->state == Members::State::kIntroducing) {
    status = cpu_->allgather(members_->exchange);
    if (status.ok()) status = choose(members_);
  }
  if (status.ok() && members_->state == Members::State::kNaming) {
    status = cpu_->broadcast(members_->naming, 0, [](uint64_t) {});
    if (status.ok()) status = choose(members_);
  }
  if (status.ok() && members_->state == Members::State::kConnecting) {
    status = settle(members_->communicator.get());
    if (status.ok()) members_->state = Members::State::kReady;
  }
  return status;
}

void NcclDataPlane::introduce(Members* members) {
  Introduction mine{};
  mine.gpu = gpu_->uuid();
  mine.operations = static_cast<int32_t>(options_.operations);
  if (nccl_.has_value()) {
    mine.nccl_version = nccl_->version();
  } else {
    refuse(why_no_nccl_, &mine);
  }
  members->introductions.assign(1 + team_->size(), Introduction());
  members->introductions[0] = mine;
  char* next = reinterpret_cast<char*>(members->introductions.data());
  members->exchange = Gather{next, {}};
  for (size_t place = 0; place < team_->size(); ++place) {
    members->exchange.blocks.push_back({next += sizeof(Introduction), sizeof(Introduction)});
  }
  members->state = Members::State::kIntroducing;
}

// Called after the introductions, and again when the first member has made the id of a communicator, or has failed to.
Status NcclDataPlane::choose(Members* members) {
  const bool is_named = members->state == Members::State::kNaming;
  const std::vector<Introduction> introductions(members->introductions.begin() + 1, members->introductions.end());
  const TransportChoice choice = choose_transport(introductions, team_->ranks);
  if (!is_named &&
      team_->size() == static_cast<size_t>(size_)) {  // a smaller team may leave GPUs to ranks outside of it
    const std::string advice = advise_on_placement(introductions, team_->ranks, team_->mine, gpu_->visible());
    if (!advice.empty()) log(LogLevel::kWarning, advice);
  }
  if (!choice.uses_nccl) {
    if (options_.operations == GpuOperations::kNccl) {
      return Status(HVL_JOB_BROKEN, "HOROVODLIKE_GPU_OPERATIONS=nccl cannot be followed: " + choice.reason);
    }
    const LogLevel level = options_.operations == GpuOperations::kStaging ? LogLevel::kDebug : LogLevel::kWarning;
    if (team_->mine == 0) log(level, "tensors on GPUs go through the memory of the host: " + choice.reason);
    members->state = Members::State::kReady;
    return Status();
  }
  if (!is_named) {
    name(members);
    return Status();
  }
  members->communicator = std::make_unique<NcclCommunicator>(*nccl_, stream_);
  members->state = Members::State::kConnecting;
  return members->communicator->start(introductions[0].id, static_cast<int>(team_->size()),
                                      static_cast<int>(team_->mine));
}

// NCCL listens for the members from the moment that it makes an id, so an id is made only if it will be used.
void NcclDataPlane::name(Members* members) {
  Introduction* first = &members->introductions[1];
  if (team_->mine == 0) {
    const NcclResult result = nccl_->ncclGetUniqueId(&first->id);
    if (result != kNcclSuccess) refuse(nccl_->describe(result, nullptr), first);
  }
  char* memory = reinterpret_cast<char*>(first);
  members->naming.add(memory, memory, sizeof *first, Reduction());
  members->state = Members::State::kNaming;
}

// Waits until NCCL has given the calls' work to the device, for which it may need the other members.
Status NcclDataPlane::settle(NcclCommunicator* communicator) {
  Status failure;
  const auto is_over = [&] {
    bool done = false;
    if (failure.ok()) failure = communicator->poll(&done);
    return done || !failure.ok();
  };
  Status status = waiter_->wait_polling(is_over, [this] { return others(); });
  return failure.ok() ? status : failure;
}

std::string NcclDataPlane::others() const {
  std::vector<int> ranks = team_->ranks;
  ranks.erase(ranks.begin() + static_cast<std::ptrdiff_t>(team_->mine));
  if (ranks.empty()) return "NCCL";
  return (ranks.size() > 1 ? "one of " : "") + text_of_ranks(ranks);
}

}  // namespace hvl
