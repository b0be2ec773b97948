// The links to ranks of other hosts, as a set of descriptors: tells which links can move something.
#pragma once

#include <vector>

#include "p2p/peer_link.h"
#include "sync/poller.h"

namespace hvl {

class RemoteLinks {
 public:
  // Input on a link ends the idle sleep of `poller`. Throws std::runtime_error where the system refuses something.
  explicit RemoteLinks(Poller* poller);
  ~RemoteLinks();
  RemoteLinks(const RemoteLinks&) = delete;
  RemoteLinks& operator=(const RemoteLinks&) = delete;

  void add(PeerLink* link);
  // The link is lost. Its stream stays open: if it were closed, its peer might give that as the reason before this rank
  // has given its own.
  void remove(const PeerLink& link);
  // The link has progressed: waits for what it needs next.
  void update(const PeerLink& link);
  // Those that can move something, without waiting; a bounded number.
  const std::vector<PeerLink*>& find_ready();

 private:
  struct Watched {
    PeerLink* link = nullptr;  // null: the rank is on this host
    int fd = -1;
    bool sends = false;  // it is also watched for room
  };

  void control(int operation, const Watched& watched);
  Watched& of(const PeerLink& link) { return watched_[static_cast<size_t>(link.rank())]; }

  int epoll_ = -1;
  std::vector<Watched> watched_;  // by rank
  std::vector<PeerLink*> ready_;
};

}  // namespace hvl
