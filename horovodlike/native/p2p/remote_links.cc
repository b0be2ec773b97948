#include "p2p/remote_links.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/clock.h"

namespace hvl {

namespace {

constexpr int kMostReady = 64;

}  // namespace

RemoteLinks::RemoteLinks(Poller* poller) : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_ == -1) throw std::runtime_error(std::string("cannot watch connections: ") + strerror(errno));
  const Status status = poller->watch(epoll_);
  if (status.ok()) return;
  close(epoll_);
  throw std::runtime_error(status.message());
}

RemoteLinks::~RemoteLinks() { close(epoll_); }

void RemoteLinks::control(int operation, const Watched& watched) {
  epoll_event event{};
  event.events = watched.sends ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.ptr = watched.link;
  if (epoll_ctl(epoll_, operation, watched.fd, &event) == -1) {
    throw std::runtime_error(std::string("cannot watch a connection: ") + strerror(errno));
  }
}

void RemoteLinks::add(PeerLink* link) {
  std::vector<pollfd> polled;
  link->stream().add_to(&polled);
  watched_.resize(std::max(watched_.size(), static_cast<size_t>(link->rank()) + 1));
  of(*link) = Watched{link, polled.at(0).fd, false};
  control(EPOLL_CTL_ADD, of(*link));
}

void RemoteLinks::tell_broken(const std::string& why) {
  for (const Watched& watched : watched_) {
    if (watched.link != nullptr) watched.link->tell_broken(why);
  }
}

bool RemoteLinks::find_ready() {
  epoll_event events[kMostReady];
  const int count = epoll_wait(epoll_, events, kMostReady, 0);
  ready_.clear();
  for (int index = 0; index < count; ++index) ready_.push_back(static_cast<PeerLink*>(events[index].data.ptr));
  for (const Watched& watched : watched_) {
    if (watched.link != nullptr && watched.link->can_progress()) ready_.push_back(watched.link);
  }
  return !ready_.empty();
}

Status RemoteLinks::progress(bool* progressed) {
  find_ready();
  for (PeerLink* link : ready_) {
    if (link->is_lost()) continue;
    Status status = link->progress(progressed);
    Watched& watched = of(*link);
    if (link->is_lost()) {
      *progressed = true;
      control(EPOLL_CTL_DEL, watched);
      lost_.push_back(Lost{link, now_ns(), std::move(status)});
    } else if (!status.ok()) {
      return status;
    } else if (watched.sends != link->is_sending()) {  // watches it for room only while it is sending
      watched.sends = link->is_sending();
      control(EPOLL_CTL_MOD, watched);
    }
  }
  return Status();
}

}  // namespace hvl
