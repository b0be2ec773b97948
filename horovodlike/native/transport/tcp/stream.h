// One connection to a rank of another host, for the bytes of collectives: what to send and where to put what comes, in
// an order that both sides know. No bytes but these are on it.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace hvl {

// Memory that waits to be sent or filled. Positions count the bytes of one direction from its beginning.
class Transfer {
 public:
  // Returns where it ends.
  uint64_t add(void* data, uint64_t num_bytes);
  bool is_empty() const { return moved_ == queued_; }
  uint64_t moved() const { return moved_; }
  // The next pieces, for one system call.
  iovec* next() { return &pieces_[first_]; }
  size_t count() const;
  uint64_t num_bytes_of(size_t count) const;
  void advance(uint64_t num_bytes);

 private:
  std::vector<iovec> pieces_;
  size_t first_ = 0;
  uint64_t queued_ = 0;
  uint64_t moved_ = 0;
};

class Stream {
 public:
  // Owns `fd`, which does not block. `peer` is for messages.
  Stream(int fd, std::string peer) : fd_(fd), peer_(std::move(peer)) {}
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // The memory is borrowed until that position has been moved.
  uint64_t send(const void* data, uint64_t num_bytes) { return sent_.add(const_cast<void*>(data), num_bytes); }
  uint64_t receive(void* data, uint64_t num_bytes) { return received_.add(data, num_bytes); }
  bool has_sent(uint64_t end) const { return sent_.moved() >= end; }
  bool has_received(uint64_t end) const { return received_.moved() >= end; }
  bool is_idle() const { return sent_.is_empty() && received_.is_empty(); }
  bool is_receiving() const { return !received_.is_empty(); }
  const std::string& peer() const { return peer_; }

  // Moves what can be moved without waiting; sets *moved if anything was.
  Status progress(bool* moved);
  pollfd polled() const;
  // An error: something is on its way to the peer, whose host has been silent for several times as long as keepalive
  // lets it be while nothing is. TCP_USER_TIMEOUT would not do: it also ends connections to a host that answers, but
  // whose process is stopped and takes no more.
  Status check_answered() const;
  // Nothing may be moved any more.
  void close();

 private:
  Status send_some(bool* moved);
  Status receive_some(bool* moved);
  Status lost(const std::string& why) const;

  int fd_;
  std::string peer_;
  Transfer sent_;
  Transfer received_;
};

}  // namespace hvl
