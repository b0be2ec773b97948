// Streaming through shared memory: the schedule that every collective of one host follows.
//
// A stream is cut into chunks. Each rank owns `depth` slots; chunk c uses slot c % depth. Per chunk a rank
//   fills   its slot with its bytes,
//   reduces its part of the chunk once all ranks have filled, and
//   drains  the chunk (takes out what it needs) once all ranks have reduced.
// Counters of completed steps replace barriers. A rank does whatever step is possible, the latest one first, so what
// it touches is still in its cache; it waits only when no step is possible. A slot is filled again only when nobody
// needs what stood there.
//
// The counters run on from batch to batch: a slow rank may still drain the last chunks while others fill the next.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "watch/waiter.h"

namespace hvl {

class ChunkPipeline {
 public:
  ChunkPipeline(std::shared_ptr<HostMemory> memory, int local_rank, Waiter* waiter)
      : memory_(std::move(memory)), local_rank_(local_rank), waiter_(waiter) {}

  int ranks() const { return memory_->shape().ranks; }
  int local_rank() const { return local_rank_; }
  uint64_t slot_bytes() const { return static_cast<uint64_t>(memory_->shape().slot_bytes); }
  uint64_t depth() const { return static_cast<uint64_t>(memory_->shape().slot_depth); }
  // The slot of `rank` for chunk number `chunk` of the stream that run() works on, or is called for next.
  char* slot(int rank, uint64_t chunk) const { return memory_->slot(rank, base_ + chunk); }

  // Runs the steps for chunks 0 .. count - 1; each step is a callable that takes the chunk's number. HVL_IN_PROGRESS:
  // interrupted while it waited; the same call goes on from there.
  template <typename Fill, typename Reduce, typename Drain>
  Status run(uint64_t count, Fill&& fill, Reduce&& reduce, Drain&& drain) {
    Progress& mine = memory_->rank(local_rank_).progress;
    const uint64_t end = base_ + count;
    // The others are done with this rank's slot when they have reduced, for which draining waits. What an earlier
    // stream left there, in the first slots, they may still have to drain.
    auto may_fill = [&] {
      return filled_ < end && filled_ < drained_ + depth() && (filled_ >= base_ + depth() || slot_is_free(filled_));
    };
    while (drained_ < end) {
      if (drained_ < reduced_ && all_past(&Progress::reduced, drained_)) {
        drain(drained_ - base_);
        publish(&mine.drained, ++drained_);
      } else if (reduced_ < filled_ && all_past(&Progress::filled, reduced_)) {
        reduce(reduced_ - base_);
        publish(&mine.reduced, ++reduced_);
      } else if (may_fill()) {
        fill(filled_ - base_);
        publish(&mine.filled, ++filled_);
      } else {
        auto step_is_possible = [&] {
          return (drained_ < reduced_ && all_past(&Progress::reduced, drained_)) ||
                 (reduced_ < filled_ && all_past(&Progress::filled, reduced_)) || may_fill();
        };
        auto lags = [&](int peer) {
          Progress& theirs = memory_->rank(peer).progress;
          return (reduced_ < filled_ && theirs.filled.load() <= reduced_) ||
                 (drained_ < reduced_ && theirs.reduced.load() <= drained_) ||
                 (filled_ < end && filled_ < base_ + depth() && theirs.drained.load() + depth() <= filled_);
        };
        Status status = waiter_->wait(step_is_possible, lags);
        if (!status.ok()) return status;
      }
    }
    base_ = end;
    return Status();
  }

  // The same for collectives that reduce nothing, or where every rank reduces everything while it drains: one
  // synchronisation a chunk instead of two.
  template <typename Fill, typename Drain>
  Status run(uint64_t count, Fill&& fill, Drain&& drain) {
    Progress& mine = memory_->rank(local_rank_).progress;
    const uint64_t end = base_ + count;
    while (drained_ < end) {
      if (drained_ < filled_ && all_past(&Progress::filled, drained_)) {
        drain(drained_ - base_);
        ++drained_;
        mine.reduced.store(drained_, std::memory_order_relaxed);
        publish(&mine.drained, drained_);
      } else if (filled_ < end && slot_is_free(filled_)) {
        fill(filled_ - base_);
        publish(&mine.filled, ++filled_);
      } else {
        auto step_is_possible = [&] {
          return (drained_ < filled_ && all_past(&Progress::filled, drained_)) ||
                 (filled_ < end && slot_is_free(filled_));
        };
        auto lags = [&](int peer) {
          Progress& theirs = memory_->rank(peer).progress;
          return (drained_ < filled_ && theirs.filled.load() <= drained_) ||
                 (filled_ < end && theirs.drained.load() + depth() <= filled_);
        };
        Status status = waiter_->wait(step_is_possible, lags);
        if (!status.ok()) return status;
      }
    }
    base_ = reduced_ = end;
    return Status();
  }

 private:
  using Counter = std::atomic<uint64_t>;

  bool all_past(Counter Progress::* counter, uint64_t chunk) const {
    for (int rank = 0; rank < ranks(); ++rank) {
      if ((memory_->rank(rank).progress.*counter).load() <= chunk) return false;
    }
    return true;
  }

  bool slot_is_free(uint64_t chunk) const { return chunk < depth() || all_past(&Progress::drained, chunk - depth()); }

  void publish(Counter* counter, uint64_t value) {
    counter->store(value);
    memory_->ring_all_but(local_rank_, kRingProgress);
  }

  std::shared_ptr<HostMemory> memory_;
  int local_rank_;
  Waiter* waiter_;
  // Chunks of all streams: before the one that is run, or is run next; and how far this rank is. Between two runs all
  // are equal, and the same on all ranks.
  uint64_t base_ = 0, filled_ = 0, reduced_ = 0, drained_ = 0;
};

}  // namespace hvl
