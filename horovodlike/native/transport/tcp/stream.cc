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

constexpr size_t kMaxPieces = 64;          // of one system call
constexpr uint64_t kMaxBytes = 512 << 10;  // of one system call, so that both directions get on
constexpr size_t kForgetPieces = 256;      // that were moved

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

uint64_t Transfer::add(void* data, uint64_t num_bytes) {
  if (num_bytes == 0) return queued_;
  if (first_ == pieces_.size()) {
    pieces_.clear();
    first_ = 0;
  }
  queued_ += num_bytes;
  const bool has_last = first_ < pieces_.size();
  if (has_last && static_cast<char*>(pieces_.back().iov_base) + pieces_.back().iov_len == data) {
    pieces_.back().iov_len += num_bytes;
  } else {
    pieces_.push_back({data, num_bytes});
  }
  return queued_;
}

size_t Transfer::count() const {
  const size_t most = std::min(kMaxPieces, pieces_.size() - first_);
  size_t count = 0;
  for (uint64_t num_bytes = 0; count < most && num_bytes < kMaxBytes; ++count) {
    num_bytes += pieces_[first_ + count].iov_len;
  }
  return count;
}

uint64_t Transfer::num_bytes_of(size_t count) const {
  uint64_t num_bytes = 0;
  for (size_t index = 0; index < count; ++index) num_bytes += pieces_[first_ + index].iov_len;
  return num_bytes;
}

void Transfer::advance(uint64_t num_bytes) {
  moved_ += num_bytes;
  while (num_bytes > 0) {
    iovec& piece = pieces_[first_];
    const uint64_t part = std::min<uint64_t>(num_bytes, piece.iov_len);
    piece.iov_base = static_cast<char*>(piece.iov_base) + part;
    piece.iov_len -= part;
    num_bytes -= part;
    if (piece.iov_len == 0) ++first_;
  }
  if (first_ >= kForgetPieces) {
    pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<std::ptrdiff_t>(first_));
    first_ = 0;
  }
}

Stream::~Stream() { close(); }

void Stream::close() {
  if (fd_ != -1) ::close(fd_);
  fd_ = -1;
}

Status Stream::lost(const std::string& why) const {
  return Status(HVL_JOB_BROKEN, "the connection to " + peer_ + " was lost: " + why);
}

Status Stream::progress(bool* moved) {
  Status status;
  if (!sent_.is_empty()) status = send_some(moved);
  if (status.ok() && !received_.is_empty()) status = receive_some(moved);
  return status;
}

Status Stream::send_some(bool* moved) {
  while (!sent_.is_empty()) {
    msghdr message{};
    message.msg_iov = sent_.next();
    message.msg_iovlen = sent_.count();
    const ssize_t sent = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == -1 && errno == EINTR) continue;
    if (sent == -1) return errno == EAGAIN || errno == EWOULDBLOCK ? Status() : lost(strerror(errno));
    const bool all = static_cast<uint64_t>(sent) == sent_.num_bytes_of(message.msg_iovlen);
    sent_.advance(static_cast<uint64_t>(sent));
    *moved = true;
    if (!all || !received_.is_empty()) return Status();
  }
  return Status();
}

Status Stream::receive_some(bool* moved) {
  while (!received_.is_empty()) {
    msghdr message{};
    message.msg_iov = received_.next();
    message.msg_iovlen = received_.count();
    const ssize_t came = recvmsg(fd_, &message, MSG_DONTWAIT);
    if (came == -1 && errno == EINTR) continue;
    if (came == -1) return errno == EAGAIN || errno == EWOULDBLOCK ? Status() : lost(strerror(errno));
    if (came == 0) return lost("it has closed it in the middle of a collective, so it has ended or given up");
    received_.advance(static_cast<uint64_t>(came));
    *moved = true;
    return Status();
  }
  return Status();
}

pollfd Stream::polled() const {
  const int events = (sent_.is_empty() ? 0 : POLLOUT) | (received_.is_empty() ? 0 : POLLIN);
  return {fd_, static_cast<short>(events), 0};
}

Status Stream::check_answered() const {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return Status();  // it is not TCP
  // A peer that takes no more answers each probe: with two of them, the first has not been answered.
  const bool expects_answer = info.tcpi_unacked > 0 || info.tcpi_probes > 1;
  const uint64_t silence = std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv) * kMillisecond;
  if (!expects_answer || silence < kPatience * keepalive_time(fd_)) return Status();
  return lost("its host has acknowledged nothing for " + std::to_string(silence / kSecond) + " s");
}

}  // namespace hvl
