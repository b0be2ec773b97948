#include "transport/tcp/stream.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace hvl {

namespace {

constexpr uint64_t kPatience = 4;  // keepalive times: data may queue behind other data on a slow link

uint64_t keepalive_time(int fd) {
  const auto get = [fd](int name) {
    int value = 0;
    socklen_t length = sizeof value;
    return getsockopt(fd, IPPROTO_TCP, name, &value, &length) == 0 ? static_cast<uint64_t>(value) : 0;
  };
  return (get(TCP_KEEPIDLE) + get(TCP_KEEPINTVL) * get(TCP_KEEPCNT)) * kSecond;
}

}  // namespace

Stream::~Stream() { close(); }

void Stream::close() {
  if (fd_ != -1) ::close(fd_);
  fd_ = -1;
}

Status Stream::lost(const std::string& why) const {
  return Status::lost("the connection to " + peer_ + " was lost: " + why);
}

// After a system call that moved nothing: 0 bytes, or an error, which may be that nothing can be moved now.
Status Stream::not_moved(ssize_t result) const {
  if (result == 0) return lost("it has closed it in the middle of a transfer, so it has ended or given up");
  const bool is_transient = errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  return is_transient ? Status() : lost(strerror(errno));
}

Status Stream::progress(bool* moved) {
  Status status;
  if (!sent_.is_empty()) status = seal_ == nullptr ? send_some(moved) : send_sealed(moved);
  if (status.ok() && !received_.is_empty()) status = seal_ == nullptr ? receive_some(moved) : receive_sealed(moved);
  return status;
}

Status Stream::send_some(bool* moved) {
  while (!sent_.is_empty()) {
    msghdr message{};
    message.msg_iov = sent_.next();
    message.msg_iovlen = sent_.count();
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == -1) return not_moved(sent);
    const bool all = static_cast<uint64_t>(sent) == sent_.num_bytes_of(message.msg_iovlen);
    sent_.advance(static_cast<uint64_t>(sent));
    *moved = true;
    if (!all || !received_.is_empty()) return Status();
  }
  return Status();
}

Status Stream::receive_some(bool* moved) {
  msghdr message{};
  message.msg_iov = received_.next();
  message.msg_iovlen = received_.count();
  const ssize_t came = recvmsg(fd_, &message, MSG_DONTWAIT);
  if (came <= 0) return not_moved(came);
  received_.advance(static_cast<uint64_t>(came));
  *moved = true;
  return Status();
}

// Sends frame by frame. Memory counts as sent when the kernel has taken the whole frame that contains it.
Status Stream::send_sealed(bool* moved) {
  while (!sent_.is_empty()) {
    DataSealer& sealer = seal_->sealer;
    if (sealer.is_flushed()) sealer.seal(sent_);
    const ssize_t sent = ::send(fd_, sealer.data(), sealer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == -1) return not_moved(sent);
    sealer.drop(static_cast<size_t>(sent));
    *moved = true;
    if (!sealer.is_flushed()) return Status();
    sent_.advance(sealer.payload_bytes());
    if (!received_.is_empty()) return Status();
  }
  return Status();
}

Status Stream::receive_sealed(bool* moved) {
  DataOpener& opener = seal_->opener;
  const uint64_t before = received_.moved();
  Status status = opener.open(&received_);  // bytes that arrived before receive() was called for them
  *moved |= received_.moved() != before;
  if (!status.ok() || received_.is_empty()) return status;
  size_t most;
  char* room = opener.room(&most);
  const ssize_t came = recv(fd_, room, most, MSG_DONTWAIT);
  if (came <= 0) return not_moved(came);
  opener.add(static_cast<size_t>(came));
  *moved = true;
  return opener.open(&received_);
}

pollfd Stream::polled() const {
  const int events = (sent_.is_empty() ? 0 : POLLOUT) | (received_.is_empty() ? 0 : POLLIN);
  return {fd_, static_cast<short>(events), 0};
}

Status Stream::check_answered() const {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return Status();  // it is not TCP
  // A peer whose window is closed answers each probe: with two of them outstanding, the first has not been answered.
  const bool expects_answer = info.tcpi_unacked > 0 || info.tcpi_probes > 1;
  const uint64_t silence = std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv) * kMillisecond;
  if (!expects_answer || silence < kPatience * keepalive_time(fd_)) return Status();
  return lost("its host has acknowledged nothing for " + std::to_string(silence / kSecond) + " s");
}

}  // namespace hvl
