// The part of the data plane that checks the progress of the device, and ends its work with the job.

#include <time.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "base/memory.h"
#include "nccl/nccl_data_plane.h"

namespace hvl {

namespace {

constexpr uint64_t kPollInterval = 50 * kMicrosecond;

// Polls `condition` for kLeaveTimeout at most. Returns whether it became true.
bool poll_until(const std::function<bool()>& condition) {
  const uint64_t deadline = now_ns() + kLeaveTimeout;
  while (!condition()) {
    if (now_ns() >= deadline) return false;
    const timespec pause{0, static_cast<long>(kPollInterval)};
    nanosleep(&pause, nullptr);
  }
  return true;
}

}  // namespace

// The stream is idle, or its remaining work outlives this: then the memory that it copies from is leaked, too.
NcclDataPlane::~NcclDataPlane() {
  if (stream_ == nullptr) return;
  abort_communicators();
  if (drain()) {
    in_flight_.clear();
    gpu_->destroy_stream(stream_);
  } else {
    leak(new std::deque<InFlight>(std::move(in_flight_)));
    leak(new std::shared_ptr<PinnedMemory>(staging_->memory()));
  }
}

Status NcclDataPlane::check() {
  const Gpu::Current current(*gpu_);
  Status status = current.status();
  bool done = true;
  while (status.ok() && done && !in_flight_.empty()) {
    status = in_flight_.front().result->done().query(&done);
    if (!status.ok() || !done) break;
    in_flight_.pop_front();
    progressed_at_ = now_ns();
    warned_ = false;
  }
  if (status.ok() && in_flight_.empty()) finish_retired();
  for (const auto& [team, members] : all_members_) {
    if (in_flight_.empty() || !status.ok()) break;
    if (members->communicator != nullptr) status = members->communicator->poll(&done);
  }
  return broken(status.ok() ? check_stall() : status);
}

// The ranks have already agreed on the work in flight, and NCCL does not detect most of the causes that stall a device.
Status NcclDataPlane::check_stall() {
  if (in_flight_.empty()) return Status();
  return waiter_->report_stall(now_ns() - progressed_at_, &warned_, [this] { return describe_stall(); });
}

Stall NcclDataPlane::describe_stall() const {
  const InFlight& first = in_flight_.front();
  const bool is_ready = std::all_of(first.ready.begin(), first.ready.end(), [](const GpuEventPtr& ready) {
    bool done = false;
    return ready->query(&done).ok() && done;
  });
  return {who(), first.name,
          is_ready ? "it waits for the GPUs of other ranks, or NCCL hangs"
                   : "the stream that makes the tensors is not done with what it was given before"};
}

void NcclDataPlane::forget(const TeamPtr& team) {
  const auto found = all_members_.find(team.get());
  if (found == all_members_.end()) return;
  if (found->second->communicator != nullptr) retired_.push_back(std::move(found->second->communicator));
  all_members_.erase(found);
  members_ = nullptr;
}

// Does not wait for communicators that cannot be finished.
void NcclDataPlane::finish_retired() {
  std::vector<std::unique_ptr<NcclCommunicator>> unfinished;
  std::vector<std::unique_ptr<NcclCommunicator>> failed;
  for (std::unique_ptr<NcclCommunicator>& communicator : retired_) {
    bool done = false;
    const Status status = communicator->finish(&done);
    if (!done) (status.ok() ? unfinished : failed).push_back(std::move(communicator));
  }
  retired_ = std::move(unfinished);
  if (!failed.empty()) abort_all(gpu_, std::move(failed), 0);
}

void NcclDataPlane::retire_all() {
  for (auto& [team, members] : all_members_) {
    if (members->communicator != nullptr) retired_.push_back(std::move(members->communicator));
  }
  all_members_.clear();
  members_ = nullptr;
}

void NcclDataPlane::abort_communicators() {
  retire_all();
  const bool have_ended = retired_.empty() || abort_all(gpu_, std::move(retired_), kLeaveTimeout);
  retired_.clear();
  is_stuck_ |= !have_ended;
}

// Returns whether the stream reached its end within kLeaveTimeout.
bool NcclDataPlane::drain() {
  GpuEventPtr end;
  if (is_stuck_) return false;
  if (!gpu_->record(stream_, &end).ok()) return true;  // a device that has failed does nothing
  return poll_until([&] {
    bool done = false;
    return !end->query(&done).ok() || done;
  });
}

void NcclDataPlane::close() {
  retire_all();
  poll_until([&] {
    const Gpu::Current current(*gpu_);
    finish_retired();
    return retired_.empty();
  });
  abort_communicators();  // the remaining ones
}

void NcclDataPlane::abort(const Status& why) {
  size_t num_failed = 0;
  for (const InFlight& each : in_flight_) {  // before the device can continue
    bool done = false;
    if (each.result->done().query(&done).ok() && done) continue;
    each.result->fail(why);
    ++num_failed;
  }
  if (num_failed > 0) {  // perhaps only streams wait for them
    log(LogLevel::kError, who() + " was not done with " + std::to_string(num_failed) +
                              " batches when the job broke: the tensors of their results are not to be used");
  }
  abort_communicators();
  // Work under way may still write to its tensors.
  const bool has_ended = drain();
  for (const InFlight& each : in_flight_) each.result->let_go();
  if (has_ended) {
    in_flight_.clear();
  } else {
    log(LogLevel::kWarning, "the GPU does not get on with what it was given before the job broke");
  }
}

}  // namespace hvl
