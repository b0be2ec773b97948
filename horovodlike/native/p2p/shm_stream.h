// The bytes of messages between two ranks of a host. They are copied between the memory of the messages and a ring
// buffer in shared memory, of which there is one for each direction.
#pragma once

#include <memory>

#include "p2p/peer_stream.h"
#include "shm/host_memory.h"
#include "transport/byte_queue.h"

namespace hvl {

class ShmStream final : public PeerStream {
 public:
  // `local_rank`: this rank's; `peer`: the other rank's local rank. `pid`: the other rank's process; 0: its memory is
  // not accessed directly.
  ShmStream(std::shared_ptr<HostMemory> memory, int local_rank, int peer, int pid)
      : memory_(std::move(memory)),
        peer_(peer),
        pid_(pid),
        out_(memory_->message_ring(local_rank, peer)),
        in_(memory_->message_ring(peer, local_rank)),
        sent_copy_(memory_, peer, &out_.block->joint_copy),
        received_copy_(memory_, peer, &in_.block->joint_copy) {}

  uint64_t send(const void* data, uint64_t num_bytes) override { return sent_.add(const_cast<void*>(data), num_bytes); }
  uint64_t receive(void* data, uint64_t num_bytes) override { return received_.add(data, num_bytes); }
  bool has_sent(uint64_t end) const override { return sent_.moved() >= end; }
  bool has_received(uint64_t end) const override { return received_.moved() >= end; }
  Status progress(bool* moved) override {
    if (!sent_.is_empty()) *moved |= write();
    if (!received_.is_empty()) *moved |= read();
    return Status();
  }
  bool can_progress() const override;
  bool can_copy() const override { return pid_ != 0; }
  bool copy_from(uint64_t address, char* to, uint64_t num_bytes) override;
  bool copy_to(uint64_t address, const char* from, uint64_t num_bytes) override;
  bool has_refused() const override { return has_refused_; }
  void await_copies() override;
  JointCopy* sent_copy() override { return can_copy() ? &sent_copy_ : nullptr; }
  JointCopy* received_copy() override { return can_copy() ? &received_copy_ : nullptr; }

 private:
  bool write();
  bool read();

  const std::shared_ptr<HostMemory> memory_;
  const int peer_, pid_;
  const MessageRing out_, in_;
  Transfer sent_, received_;
  JointCopy sent_copy_, received_copy_;
  bool has_refused_ = false;
};

}  // namespace hvl
