// The links to ranks of other hosts, as a set of descriptors, to find the links that can move bytes.
#pragma once

#include <string>
#include <vector>

#include "p2p/peer_link.h"
#include "sync/poller.h"

namespace hvl {

class RemoteLinks {
 public:
  struct Lost {
    PeerLink* link;
    uint64_t since;
    Status status;
  };

  // Input on a link ends the idle sleep of `poller`. Throws std::runtime_error on a system error.
  explicit RemoteLinks(Poller* poller);
  ~RemoteLinks();
  RemoteLinks(const RemoteLinks&) = delete;
  RemoteLinks& operator=(const RemoteLinks&) = delete;

  void add(PeerLink* link);
  // As Messenger::tell_broken().
  void tell_broken(const std::string& why);
  // Finds links that can move bytes, without waiting; if there are many, perhaps not all of them.
  bool find_ready();
  // Progresses such links. One that is lost is no error: lost() lists it. Its stream stays open: if it were closed, the
  // peer might report that as the reason of the failure before this rank has reported the real one.
  Status progress(bool* progressed);
  const std::vector<Lost>& lost() const { return lost_; }

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
  std::vector<Lost> lost_;
};

}  // namespace hvl
