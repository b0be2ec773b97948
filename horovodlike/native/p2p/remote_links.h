// The links to ranks of other hosts, as a set of descriptors, to find the links that can move bytes.
#pragma once

#include <vector>

#include "p2p/peer_link.h"
#include "sync/poller.h"

namespace hvl {

class RemoteLinks {
 public:
  // Input on a link ends the idle sleep of `poller`. Throws std::runtime_error on a system error.
  explicit RemoteLinks(Poller* poller);
  ~RemoteLinks();
  RemoteLinks(const RemoteLinks&) = delete;
  RemoteLinks& operator=(const RemoteLinks&) = delete;

  void add(PeerLink* link);
  // Stops watching a lost link. Its stream stays open: if it were closed, the peer might report that as the reason of
  // the failure before this rank has reported the real one.
  void remove(const PeerLink& link);
  // Called after the link has progressed: watches it for room only while it is sending.
  void update(const PeerLink& link);
  // Returns links that can move bytes, without waiting; if there are many, perhaps not all of them.
  const std::vector<PeerLink*>& find_ready();

 private:
  struct Watched {
    PeerLink* link = nullptr;  // null: the rank is on this host
    int fd = -1;
    bool sends = false;  // also watched for room to send
  };

  void control(int operation, const Watched& watched);
  Watched& of(const PeerLink& link) { return watched_[static_cast<size_t>(link.rank())]; }

  int epoll_ = -1;
  std::vector<Watched> watched_;  // by rank
  std::vector<PeerLink*> ready_;
};

}  // namespace hvl
