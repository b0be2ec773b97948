#include "transport/shm/shm_control.h"

#include <utility>

namespace hvl {

namespace {

std::vector<std::atomic<uint64_t>*> log_readers(HostMemory* memory) {
  std::vector<std::atomic<uint64_t>*> readers;
  for (int rank = 1; rank < memory->shape().ranks; ++rank) readers.push_back(&memory->rank(rank).log_read);
  return readers;
}

}  // namespace

ShmCoordinator::ShmCoordinator(std::shared_ptr<HostMemory> memory, const SeatOptions& options, std::vector<int> pids)
    : memory_(std::move(memory)),
      seat_(options),
      questions_(memory_, std::move(pids)),
      log_(memory_->log_ring(), kLogRingBytes, &memory_->log_written(), log_readers(memory_.get())) {
  for (int rank = 1; rank < memory_->shape().ranks; ++rank) {
    RankBlock& block = memory_->rank(rank);
    requests_.emplace_back(memory_->request_ring(rank), kRequestRingBytes, &block.requests_written,
                           &block.requests_read);
  }
}

Status ShmCoordinator::pump(bool* progressed) {
  for (size_t index = 0; index < requests_.size(); ++index) {
    int rank = static_cast<int>(index) + 1;
    bool freed = false;
    while (requests_[index].receive(&frame_, &freed)) {
      *progressed = true;
      Status status = decode(frame_.data(), frame_.size(), &message_);
      if (status.ok()) status = seat_.accept(rank, message_);
      if (!status.ok()) return status;
    }
    if (freed) memory_->rank(rank).doorbell.ring(kRingRoom);
  }
  seat_.decide([this](const Record& record) {
    frame_.clear();
    encode(record, &frame_);
    record_ends_.push_back(log_.send(frame_));
  });
  if (log_.pump()) {
    *progressed = true;
    memory_->ring_all_but(0, kRingNews);
  }
  return Status();
}

Status ShmCoordinator::next(Record* record, bool* found) {
  *found = next_is_public() && seat_.next(record);
  if (*found) record_ends_.pop_front();
  return Status();
}

bool ShmCoordinator::has_news() {
  if (seat_.has_messages() || next_is_public() || log_.can_pump()) return true;
  for (const RingReader& reader : requests_) {
    if (reader.has_frame()) return true;
  }
  return false;
}

ShmWorker::ShmWorker(std::shared_ptr<HostMemory> memory, int local_rank)
    : memory_(std::move(memory)),
      requests_(memory_->request_ring(local_rank), kRequestRingBytes, &memory_->rank(local_rank).requests_written,
                {&memory_->rank(local_rank).requests_read}),
      log_(memory_->log_ring(), kLogRingBytes, &memory_->log_written(), &memory_->rank(local_rank).log_read) {}

Status ShmWorker::send(const Message& message) {
  frame_.clear();
  encode(message, &frame_);
  requests_.send(frame_);
  is_leaving_ |= message.type == Message::Type::kShutdown;
  return Status();
}

Status ShmWorker::pump(bool* progressed) {
  if (requests_.pump()) {
    *progressed = true;
    memory_->rank(0).doorbell.ring(is_leaving_ ? kRingNews : kRingReady);
  }
  return Status();
}

Status ShmWorker::next(Record* record, bool* found) {
  bool freed = false;
  *found = log_.receive(&frame_, &freed);
  if (freed) memory_->rank(0).doorbell.ring(kRingRoom);
  return *found ? decode(frame_.data(), frame_.size(), record) : Status();
}

}  // namespace hvl
