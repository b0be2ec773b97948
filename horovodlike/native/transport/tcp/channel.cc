#include "transport/tcp/channel.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace hvl {

namespace {

constexpr size_t kReadBytes = size_t{32} << 10;  // in one call of pump()

bool is_transient(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

Channel::Channel(int fd, const ChannelKey& send_key, const ChannelKey& receive_key, std::string peer)
    : fd_(fd), peer_(peer), sealer_(send_key), opener_(receive_key, std::move(peer)) {
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // fails if it is not TCP, where nothing is delayed anyway
}

Channel::~Channel() { close(); }

void Channel::close() {
  const int fd = std::exchange(fd_, -1);  // first: another thread may fork at any time
  if (fd != -1) ::close(fd);
}

void Channel::send(const std::string& frame) {
  if (frame.size() <= kFrameLimit) {
    sealer_.seal(frame, &outbox_);
  } else if (failure_.ok()) {
    failure_ = Status(HVL_JOB_BROKEN, "a frame of " + std::to_string(frame.size()) + " bytes to " + peer_ +
                                          " is over the limit of " + std::to_string(kFrameLimit) + " bytes");
  }
}

void Channel::finish() {
  if (finishing_) return;
  finishing_ = true;
  sealer_.seal_end(&outbox_);
}

Status Channel::pump(bool* progressed) {
  if (!is_over()) failure_ = move(progressed);
  // Close at once: a descriptor that has hung up would wake its poller again and again.
  if (is_over() && (failure_.ok() || is_gone_)) close();
  return failure_;
}

Status Channel::move(bool* progressed) {
  const Status sending = write(progressed);
  bool has_read = false;
  const Status receiving = read(&has_read);
  *progressed |= has_read;
  // The peer's last frames may still be readable after the write error.
  if (receiving.ok() && (has_read || has_frame())) return Status();
  return sending.ok() || has_read ? receiving : sending;
}

Status Channel::write(bool* progressed) {
  if (!outbox_.empty()) {
    const ssize_t count = ::send(fd_, outbox_.data(), outbox_.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0) return is_transient(errno) ? Status() : lost(errno);
    outbox_.drop(static_cast<size_t>(count));
    *progressed = true;
  }
  if (outbox_.empty() && finishing_ && !half_closed_) {
    if (shutdown(fd_, SHUT_WR) != 0) return lost(errno);
    half_closed_ = true;
  }
  return Status();
}

Status Channel::read(bool* progressed) {
  if (has_frame() || has_ended()) return Status();
  char bytes[kReadBytes];
  const ssize_t count = recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
  if (count < 0) return is_transient(errno) ? Status() : lost(errno);
  if (count == 0) {
    is_gone_ = true;
    return opener_.close();
  }
  *progressed = true;
  return opener_.feed(bytes, static_cast<size_t>(count));
}

Status Channel::lost(int error) {
  is_gone_ = true;
  return Status(HVL_JOB_BROKEN, "the connection to " + peer_ + " is lost: " + strerror(error));
}

}  // namespace hvl
