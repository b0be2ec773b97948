// One connection to a rank of another host, for the bytes of collectives: memory to send and memory to receive into, in
// an order that both sides know. It carries only these bytes, or sealed frames of them, which count as received when
// their frame is verified.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "transport/byte_queue.h"
#include "transport/tcp/sealed_data.h"

namespace hvl {

class Stream {
 public:
  // Owns `fd`, which does not block. `peer` is for messages. `seal`: null: the bytes are sent as they are.
  Stream(int fd, std::string peer, std::unique_ptr<DataSeal> seal = nullptr)
      : fd_(fd), peer_(std::move(peer)), seal_(std::move(seal)) {}
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Queue memory, which is borrowed until all of it has been moved. Return the position of its end in that direction.
  uint64_t send(const void* data, uint64_t num_bytes) { return sent_.add(const_cast<void*>(data), num_bytes); }
  uint64_t receive(void* data, uint64_t num_bytes) { return received_.add(data, num_bytes); }
  bool has_sent(uint64_t end) const { return sent_.moved() >= end; }
  bool has_received(uint64_t end) const { return received_.moved() >= end; }
  bool is_idle() const { return sent_.is_empty() && received_.is_empty(); }
  bool is_receiving() const { return !received_.is_empty(); }
  const std::string& peer() const { return peer_; }

  // Moves as much as possible without waiting; sets *moved if anything moved.
  Status progress(bool* moved);
  pollfd polled() const;
  // An error: data is under way to the peer, and its host has not answered for several times as long as keepalive
  // allows on an idle connection. TCP_USER_TIMEOUT is unsuitable: it also ends connections to a host that answers, but
  // whose process is stopped and reads nothing.
  Status check_answered() const;
  // Closes the socket; nothing may be moved any more.
  void close();

 private:
  Status send_some(bool* moved);
  Status receive_some(bool* moved);
  Status send_sealed(bool* moved);
  Status receive_sealed(bool* moved);
  Status lost(const std::string& why) const;
  Status not_moved(ssize_t result) const;

  int fd_;
  std::string peer_;
  const std::unique_ptr<DataSeal> seal_;
  Transfer sent_;
  Transfer received_;
};

}  // namespace hvl
