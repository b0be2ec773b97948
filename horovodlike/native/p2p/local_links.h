// The links to the other ranks of this host. can_progress() checks all of them at once, without a look at each.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "p2p/peer_link.h"

namespace hvl {

class LocalLinks {
 public:
  // `moves`: this rank's RankBlock::message_moves, which counts the moves by other ranks.
  explicit LocalLinks(const std::atomic<uint64_t>* moves) : moves_(*moves) {}

  void add(PeerLink* link) { links_.push_back(link); }
  // Makes progress() look at all links: one of them may have something to send.
  void set_active() { is_active_ = true; }
  bool can_progress() const { return is_active_ || moves_.load() != seen_; }
  // Makes progress on all links that can move bytes. An error breaks the job.
  Status progress(bool* progressed) {
    seen_ = moves_.load();
    is_active_ = awaits_room_ = false;
    for (PeerLink* link : links_) {
      const Status status = link->can_progress() ? link->progress(progressed) : Status();
      if (!status.ok()) return status;
      is_active_ |= link->can_progress();
      awaits_room_ |= link->is_sending();
    }
    return Status();
  }
  // True if a link waited for room after the last progress().
  bool awaits_room() const { return awaits_room_; }

 private:
  const std::atomic<uint64_t>& moves_;
  std::vector<PeerLink*> links_;
  uint64_t seen_ = 0;
  bool is_active_ = false;
  bool awaits_room_ = false;
};

}  // namespace hvl
