#include "control/leader_rings.h"

#include <algorithm>
#include <utility>

#include "shm/ring_buffer.h"

namespace hvl {

namespace {

std::vector<std::atomic<uint64_t>*> log_readers(HostMemory* memory) {
  std::vector<std::atomic<uint64_t>*> readers;
  for (int rank = 1; rank < memory->shape().ranks; ++rank) readers.push_back(&memory->rank(rank).log_read);
  return readers;
}

}  // namespace

LeaderRings::LeaderRings(std::shared_ptr<HostMemory> memory)
    : memory_(std::move(memory)),
      log_(memory_->log_ring(), kLogRingBytes, &memory_->log_written(), log_readers(memory_.get())),
      concerned_(static_cast<size_t>(memory_->shape().ranks)) {
  for (int rank = 1; rank < memory_->shape().ranks; ++rank) {
    RankBlock& block = memory_->rank(rank);
    requests_.emplace_back(memory_->request_ring(rank), kRequestRingBytes, &block.requests_written,
                           &block.requests_read);
  }
}

Status LeaderRings::receive(const Accept& accept, bool* progressed) {
  for (size_t index = 0; index < requests_.size(); ++index) {
    int rank = static_cast<int>(index) + 1;
    bool freed = false;
    while (requests_[index].receive(&frame_, &freed)) {
      *progressed = true;
      const uint64_t sent = take_time(&frame_);
      Status status = decode(frame_.data(), frame_.size(), &message_);
      if (status.ok()) status = accept(rank, message_, sent);
      if (!status.ok()) return status;
    }
    if (freed) memory_->notify(rank, kWakeRoom);
  }
  return Status();
}

void LeaderRings::publish(Record record, const std::vector<int>& concerned) {
  frame_.clear();
  encode(record, &frame_);
  unheard_ += frame_.size();
  for (int rank : concerned) concerned_[static_cast<size_t>(rank)] = true;
  if (concerned.empty()) concerned_.assign(concerned_.size(), true);
  own_.push_back({std::move(record), log_.send(frame_)});
}

bool LeaderRings::next(Record* record) {
  if (!has_next()) return false;
  *record = std::move(own_.front().record);
  own_.pop_front();
  return true;
}

void LeaderRings::pump(bool* progressed) {
  if (!log_.pump()) return;
  *progressed = true;
  notify_readers();
}

// Ranks that a record does not concern read it when they next wake. But all must read in time, to free ring space.
void LeaderRings::notify_readers() {
  if (!log_.is_flushed() || unheard_ >= kLogRingBytes / 2) concerned_.assign(concerned_.size(), true);
  bool all = true;
  for (int rank = 1; rank < memory_->shape().ranks; ++rank) {
    const bool is_concerned = concerned_[static_cast<size_t>(rank)];
    if (is_concerned) memory_->notify(rank, kWakeNews);
    all = all && is_concerned;
  }
  if (all) unheard_ = 0;
  if (log_.is_flushed()) concerned_.assign(concerned_.size(), false);
}

bool LeaderRings::has_news() const {
  return log_.can_pump() || std::any_of(requests_.begin(), requests_.end(),
                                        [](const RingBufferReader& reader) { return reader.has_frame(); });
}

void LeaderRings::show(const std::vector<StragglerStats>& stats, const std::vector<int>& ranks) {
  for (int local_rank = 0; local_rank < memory_->shape().ranks; ++local_rank) {
    const StragglerStats& each = stats[static_cast<size_t>(ranks[static_cast<size_t>(local_rank)])];
    RankBlock& block = memory_->rank(local_rank);
    if (block.waited_for.load(std::memory_order_relaxed) == each.waited) continue;  // keeps the cache line shared
    block.waited_for.store(each.waited, std::memory_order_relaxed);
    block.times_late.store(each.times, std::memory_order_relaxed);
  }
}

}  // namespace hvl
