// Streaming through shared memory: the schedule of every collective of one host.
//
// A stream is cut into chunks. Each rank owns `depth` slots; chunk c uses slot c % depth. Per chunk a rank
//   fills   its slot with its bytes,
//   reduces its part of the chunk once all ranks have filled, and
//   drains  the chunk (copies its output) once all ranks have reduced.
// Counters of completed steps replace barriers. Of the possible steps, a rank does the last one in this order first,
// while the data is still in its cache; it waits only when no step is possible. A slot is filled again only when no
// rank needs its contents.
//
// The chunks of the n-th collective in the log are numbered from n * 2^24. So the counters only ever grow, and a rank
// that takes no part in a collective does not need to count its chunks. A slow rank may still drain the last chunks of
// one collective while others fill slots for the next one, even if that one is another team's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collective/data_plane.h"
#include "sync/waiter.h"

namespace hvl {

class ChunkPipeline {
 public:
  // The bits of a chunk's number that count the chunks of one collective. The other bits last for 2^40 collectives.
  static constexpr int kChunkBits = 24;

  ChunkPipeline(std::shared_ptr<HostMemory> memory, int local_rank, Waiter* waiter)
      : memory_(std::move(memory)), local_rank_(local_rank), waiter_(waiter), uses_(depth()) {}

  // The streams that follow belong to the `number`-th collective of the log and to `team`; this rank is a member.
  void begin(TeamPtr team, uint64_t number) {
    waiter_->begin_collective();
    team_ = std::move(team);
    base_ = filled_ = combined_ = reduced_ = drained_ = number << kChunkBits;
    first_slot_ = number - base_;
  }

  // The size of the team, and this rank's place in it: members are identified by their places.
  int ranks() const { return static_cast<int>(team_->size()); }
  int mine() const { return static_cast<int>(team_->mine); }
  uint64_t slot_bytes() const { return static_cast<uint64_t>(memory_->shape().slot_bytes); }
  uint64_t depth() const { return static_cast<uint64_t>(memory_->shape().slot_depth); }
  // The slot of a member for chunk number `chunk` of the stream that run() works on, or will be called for next.
  char* slot(int place, uint64_t chunk) const {
    return memory_->slot(team_->ranks[static_cast<size_t>(place)], first_slot_ + base_ + chunk);
  }

  // Runs the steps for chunks 0 .. count - 1; each step is a callable that takes the chunk's number. HVL_IN_PROGRESS:
  // interrupted while it waited; the same call continues from there.
  template <typename Fill, typename Reduce, typename Drain>
  Status run(uint64_t count, Fill&& fill, Reduce&& reduce, Drain&& drain) {
    Progress& mine = progress(local_rank_);
    const uint64_t end = base_ + count;
    // The slot of a drained chunk is free: the other ranks read it when they reduce, and a drain waits for that. But
    // the first slots of a stream may hold data of an earlier stream that other ranks have not drained.
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
          return (reduced_ < filled_ && is_behind(*team_, peer, &Progress::filled, reduced_)) ||
                 (drained_ < reduced_ && is_behind(*team_, peer, &Progress::reduced, drained_)) ||
                 (filled_ < end && filled_ < base_ + depth() && needs_slot(peer, filled_));
        };
        Status status = waiter_->wait(step_is_possible, lags);
        if (!status.ok()) return status;
      }
    }
    end_stream(end);
    return Status();
  }

  // The same without a step to reduce: for collectives that reduce nothing, or in which every rank reduces everything
  // while it drains. Each chunk needs one synchronisation instead of two.
  template <typename Fill, typename Drain>
  Status run(uint64_t count, Fill&& fill, Drain&& drain) {
    Progress& mine = progress(local_rank_);
    const uint64_t end = base_ + count;
    auto may_fill = [&] {
      return filled_ < end &&
             (filled_ < base_ + depth() ? slot_is_free(filled_) : all_past(&Progress::drained, filled_ - depth()));
    };
    while (drained_ < end) {
      if (drained_ < filled_ && all_past(&Progress::filled, drained_)) {
        drain(drained_ - base_);
        ++drained_;
        mine.reduced.store(drained_, std::memory_order_relaxed);
        publish(&mine.drained, drained_);
      } else if (may_fill()) {
        fill(filled_ - base_);
        publish(&mine.filled, ++filled_);
      } else {
        auto step_is_possible = [&] {
          return (drained_ < filled_ && all_past(&Progress::filled, drained_)) || may_fill();
        };
        auto lags = [&](int peer) {
          if (drained_ < filled_ && is_behind(*team_, peer, &Progress::filled, drained_)) return true;
          if (filled_ >= end) return false;
          return filled_ < base_ + depth() ? needs_slot(peer, filled_)
                                           : is_behind(*team_, peer, &Progress::drained, filled_ - depth());
        };
        Status status = waiter_->wait(step_is_possible, lags);
        if (!status.ok()) return status;
      }
    }
    end_stream(end);
    return Status();
  }

  // The same for several hosts: `combine` reduces this host's data of a chunk, `network` exchanges it with the other
  // hosts, and then `spread` writes the result to the memory from which the other members drain it. The network is a
  // HostExchange, or has its interface.
  template <typename Fill, typename Combine, typename Network, typename Spread, typename Drain>
  Status run(uint64_t count, Fill&& fill, Combine&& combine, Network* network, Spread&& spread, Drain&& drain) {
    Progress& mine = progress(local_rank_);
    const uint64_t end = base_ + count;
    auto may_fill = [&] {
      return filled_ < end && filled_ < drained_ + depth() && (filled_ >= base_ + depth() || slot_is_free(filled_));
    };
    auto may_combine = [&] { return combined_ < filled_ && all_past(&Progress::filled, combined_); };
    auto may_spread = [&] { return reduced_ < base_ + network->num_complete(); };
    auto may_drain = [&] { return drained_ < reduced_ && all_past(&Progress::reduced, drained_); };
    while (drained_ < end) {
      bool moved = false;
      Status status = network->advance(&moved);
      if (!status.ok()) return status;
      if (may_drain()) {
        drain(drained_ - base_);
        publish(&mine.drained, ++drained_);
      } else if (may_spread()) {
        spread(reduced_ - base_);
        publish(&mine.reduced, ++reduced_);
      } else if (may_combine()) {
        combine(combined_ - base_);
        ++combined_;
        network->add_source();
      } else if (may_fill()) {
        fill(filled_ - base_);
        publish(&mine.filled, ++filled_);
      } else if (!moved) {
        // The waiter checks this condition several times before it sleeps; each check may complete a chunk.
        auto step_is_possible = [&] {
          if (may_drain() || may_spread() || may_combine() || may_fill()) return true;
          bool has_moved = false;
          status = network->advance(&has_moved);
          return has_moved || !status.ok();
        };
        auto lags = [&](int peer) {
          return (combined_ < filled_ && is_behind(*team_, peer, &Progress::filled, combined_)) ||
                 (drained_ < reduced_ && is_behind(*team_, peer, &Progress::reduced, drained_)) ||
                 (filled_ < end && filled_ < base_ + depth() && needs_slot(peer, filled_));
        };
        const Status waited = waiter_->wait(step_is_possible, lags, network->sockets());
        if (!waited.ok()) return waited;
        if (!status.ok()) return status;
      }
    }
    end_stream(end);
    return Status();
  }

  Waiter* waiter() const { return waiter_; }

 private:
  using Counter = std::atomic<uint64_t>;

  // The last use of one of this rank's slots: by which team, and for which chunk.
  struct Use {
    TeamPtr team;  // null: not used yet
    uint64_t chunk = 0;
  };

  Progress& progress(int rank) const { return memory_->rank(rank).progress; }

  bool is_behind(const Team& team, int rank, Counter Progress::* counter, uint64_t chunk) const {
    return team.contains(rank) && (progress(rank).*counter).load() <= chunk;
  }

  bool all_past(const Team& team, Counter Progress::* counter, uint64_t chunk) const {
    for (int rank : team.ranks) {
      if ((progress(rank).*counter).load() <= chunk) return false;
    }
    return true;
  }
  bool all_past(Counter Progress::* counter, uint64_t chunk) const { return all_past(*team_, counter, chunk); }

  // Also for the first chunks of a stream, whose slot another team may have used.
  const Use& last_use(uint64_t chunk) const { return uses_[(first_slot_ + chunk) % depth()]; }
  bool slot_is_free(uint64_t chunk) const {
    const Use& use = last_use(chunk);
    return use.team == nullptr || all_past(*use.team, &Progress::drained, use.chunk);
  }
  bool needs_slot(int peer, uint64_t chunk) const {
    const Use& use = last_use(chunk);
    return use.team != nullptr && is_behind(*use.team, peer, &Progress::drained, use.chunk);
  }

  void end_stream(uint64_t end) {
    for (uint64_t chunk = std::max(base_ + depth(), end) - depth(); chunk < end; ++chunk) {
      Use& use = uses_[(first_slot_ + chunk) % depth()];
      if (use.team != team_) use.team = team_;
      use.chunk = chunk;
    }
    base_ = combined_ = reduced_ = end;
  }

  void publish(Counter* counter, uint64_t value) {
    counter->store(value);
    for (int rank : team_->ranks) {
      if (rank != local_rank_) memory_->notify(rank, kWakeProgress);
    }
  }

  std::shared_ptr<HostMemory> memory_;
  int local_rank_;
  Waiter* waiter_;
  TeamPtr team_;
  // `base_`: the number of the first chunk of the current stream, or between two streams of the next one. The others:
  // the number of the next chunk that this rank fills, combines, reduces and drains; between two streams all are equal.
  uint64_t base_ = 0, filled_ = 0, combined_ = 0, reduced_ = 0, drained_ = 0;
  uint64_t first_slot_ = 0;  // added to a chunk's number, so that collectives use the slots in turn
  std::vector<Use> uses_;    // by slot
};

}  // namespace hvl
