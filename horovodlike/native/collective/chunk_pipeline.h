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

  // Runs the steps for chunks 0 .. count - 1; each step is a callable that takes the chunk's number.
  template <typename Fill, typename Reduce, typename Drain>
  Status run(uint64_t count, Fill&& fill, Reduce&& reduce, Drain&& drain) {
    Progress& mine = memory_->rank(local_rank_).progress;
    const uint64_t end = base_ + count;
    uint64_t filled = base_, reduced = base_, drained = base_;
    // The others are done with this rank's slot when they have reduced, for which draining waits. What an earlier
    // stream left there, in the first slots, they may still have to drain.
    auto may_fill = [&] {
      return filled < end && filled < drained + depth() && (filled >= base_ + depth() || slot_is_free(filled));
    };
    while (drained < end) {
      if (drained < reduced && all_past(&Progress::reduced, drained)) {
        drain(drained - base_);
        publish(&mine.drained, ++drained);
      } else if (reduced < filled && all_past(&Progress::filled, reduced)) {
        reduce(reduced - base_);
        publish(&mine.reduced, ++reduced);
      } else if (may_fill()) {
        fill(filled - base_);
        publish(&mine.filled, ++filled);
      } else {
        auto step_is_possible = [&] {
          return (drained < reduced && all_past(&Progress::reduced, drained)) ||
                 (reduced < filled && all_past(&Progress::filled, reduced)) || may_fill();
        };
        auto lags = [&](int peer) {
          Progress& theirs = memory_->rank(peer).progress;
          return (reduced < filled && theirs.filled.load() <= reduced) ||
                 (drained < reduced && theirs.reduced.load() <= drained) ||
                 (filled < end && filled < base_ + depth() && theirs.drained.load() + depth() <= filled);
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
    uint64_t filled = base_, drained = base_;
    while (drained < end) {
      if (drained < filled && all_past(&Progress::filled, drained)) {
        drain(drained - base_);
        ++drained;
        mine.reduced.store(drained, std::memory_order_relaxed);
        publish(&mine.drained, drained);
      } else if (filled < end && slot_is_free(filled)) {
        fill(filled - base_);
        publish(&mine.filled, ++filled);
      } else {
        auto step_is_possible = [&] {
          return (drained < filled && all_past(&Progress::filled, drained)) || (filled < end && slot_is_free(filled));
        };
        auto lags = [&](int peer) {
          Progress& theirs = memory_->rank(peer).progress;
          return (drained < filled && theirs.filled.load() <= drained) ||
                 (filled < end && theirs.drained.load() + depth() <= filled);
        };
        Status status = waiter_->wait(step_is_possible, lags);
        if (!status.ok()) return status;
      }
    }
    base_ = end;
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
  uint64_t base_ = 0;  // chunks of all streams so far; the same on all ranks between two runs
};

}  // namespace hvl
