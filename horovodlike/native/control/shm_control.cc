#include "control/shm_control.h"

#include <numeric>
#include <utility>

#include "shm/ring_buffer.h"

namespace hvl {

namespace {

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

ShmCoordinator::ShmCoordinator(std::shared_ptr<HostMemory> memory, const CoordinatorHostOptions& options,
                               std::vector<int> pids)
    : ranks_(all_ranks(memory->shape().ranks)),
      coordinator_host_(options),
      questions_(memory, std::move(pids), ranks_),
      rings_(std::move(memory)) {}

Status ShmCoordinator::pump(bool* progressed) {
  Status status = rings_.receive(
      [this](int rank, const Message& message, uint64_t sent) { return coordinator_host_.accept(rank, message, sent); },
      progressed);
  if (!status.ok()) return status;
  const bool has_heard = coordinator_host_.has_messages();
  coordinator_host_.decide([this](const Decision& decision) {
    record_ends_.push_back(rings_.publish(decision.record, decision.concerned));
  });
  rings_.pump(progressed);
  if (has_heard) rings_.show(coordinator_host_.lateness(), ranks_);
  return Status();
}

Status ShmCoordinator::next(Record* record, bool* found) {
  *found = next_is_public() && coordinator_host_.next(record);
  if (*found) record_ends_.pop_front();
  return Status();
}

ShmWorker::ShmWorker(std::shared_ptr<HostMemory> memory, int local_rank)
    : memory_(std::move(memory)),
      requests_(memory_->request_ring(local_rank), kRequestRingBytes, &memory_->rank(local_rank).requests_written,
                {&memory_->rank(local_rank).requests_read}),
      log_(memory_->log_ring(), kLogRingBytes, &memory_->log_written(), &memory_->rank(local_rank).log_read) {}

Status ShmWorker::send(const Message& message) {
  frame_.clear();
  put_time(&frame_);
  encode(message, &frame_);
  requests_.send(frame_);
  is_leaving_ |= message.type == Message::Type::kShutdown;
  return Status();
}

Status ShmWorker::pump(bool* progressed) {
  if (requests_.pump()) {
    *progressed = true;
    memory_->notify(0, is_leaving_ ? kWakeNews : kWakeReady);
  }
  return Status();
}

Status ShmWorker::next(Record* record, bool* found) {
  bool freed = false;
  *found = log_.receive(&frame_, &freed);
  if (freed) memory_->notify(0, kWakeRoom);
  return *found ? decode(frame_.data(), frame_.size(), record) : Status();
}

}  // namespace hvl
