#include "transport/shm/shm_control.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hvl {

namespace {

std::vector<std::atomic<uint64_t>*> log_readers(HostMemory* memory) {
  std::vector<std::atomic<uint64_t>*> readers;
  for (int rank = 1; rank < memory->shape().ranks; ++rank) readers.push_back(&memory->rank(rank).log_read);
  return readers;
}

// A message begins with when it was sent: the coordinator may be asleep then, and who is late is not to be a matter of
// when it looks.
void put_time(std::string* frame) {
  const uint64_t now = now_ns();
  frame->append(reinterpret_cast<const char*>(&now), sizeof now);
}

uint64_t take_time(std::string* frame) {
  uint64_t sent = 0;
  if (frame->size() < sizeof sent) return now_ns();  // decode() refuses it
  memcpy(&sent, frame->data(), sizeof sent);
  frame->erase(0, sizeof sent);
  return std::min(sent, now_ns());
}

}  // namespace

ShmCoordinator::ShmCoordinator(std::shared_ptr<HostMemory> memory, const SeatOptions& options, std::vector<int> pids)
    : memory_(std::move(memory)),
      seat_(options),
      questions_(memory_, std::move(pids)),
      log_(memory_->log_ring(), kLogRingBytes, &memory_->log_written(), log_readers(memory_.get())),
      concerned_(static_cast<size_t>(memory_->shape().ranks)) {
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
      const uint64_t sent = take_time(&frame_);
      Status status = decode(frame_.data(), frame_.size(), &message_);
      if (status.ok()) status = seat_.accept(rank, message_, sent);
      if (!status.ok()) return status;
    }
    if (freed) memory_->rank(rank).doorbell.ring(kRingRoom);
  }
  const bool has_heard = seat_.has_messages();
  seat_.decide([this](const Decision& decision) { publish(decision); });
  if (log_.pump()) {
    *progressed = true;
    ring_readers();
  }
  if (has_heard) publish_lateness();
  return Status();
}

void ShmCoordinator::publish(const Decision& decision) {
  frame_.clear();
  encode(decision.record, &frame_);
  record_ends_.push_back(log_.send(frame_));
  unheard_ += frame_.size();
  for (int rank : decision.concerned) concerned_[static_cast<size_t>(rank)] = true;
  if (decision.concerned.empty()) concerned_.assign(concerned_.size(), true);
}

// Those that a record does not concern find it when they wake for something else; but all are to make room in time.
void ShmCoordinator::ring_readers() {
  if (!log_.is_flushed() || unheard_ >= kLogRingBytes / 2) concerned_.assign(concerned_.size(), true);
  bool all = true;
  for (int rank = 1; rank < memory_->shape().ranks; ++rank) {
    const bool is_concerned = concerned_[static_cast<size_t>(rank)];
    if (is_concerned) memory_->rank(rank).doorbell.ring(kRingNews);
    all = all && is_concerned;
  }
  if (all) unheard_ = 0;
  if (log_.is_flushed()) concerned_.assign(concerned_.size(), false);
}

void ShmCoordinator::publish_lateness() {
  for (int rank = 0; rank < memory_->shape().ranks; ++rank) {
    const Lateness& lateness = seat_.lateness()[static_cast<size_t>(rank)];
    RankBlock& block = memory_->rank(rank);
    if (block.waited_for.load(std::memory_order_relaxed) == lateness.waited) continue;  // keep the line shared
    block.waited_for.store(lateness.waited, std::memory_order_relaxed);
    block.times_late.store(lateness.times, std::memory_order_relaxed);
  }
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
  put_time(&frame_);
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
