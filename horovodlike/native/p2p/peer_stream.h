// The bytes of messages between this rank and one other, in both directions: in shared memory, or through a transport.
//
// Only the thread that holds the engine lock may use it. No function waits but await_copies().
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "p2p/joint_copy.h"
#include "transport/transport.h"

namespace hvl {

class PeerStream {
 public:
  virtual ~PeerStream() = default;

  // Queues memory, which is borrowed until all of it has been moved. Returns the position of its end in the stream.
  virtual uint64_t send(const void* data, uint64_t num_bytes) = 0;
  virtual uint64_t receive(void* data, uint64_t num_bytes) = 0;
  virtual bool has_sent(uint64_t end) const = 0;
  virtual bool has_received(uint64_t end) const = 0;
  // Moves a bounded number of bytes without waiting; sets *moved if anything moved. An error is final, and names the
  // peer. One that is_lost() concerns this stream only.
  virtual Status progress(bool* moved) = 0;
  // True if progress() would move something, as far as that is known without a system call.
  virtual bool can_progress() const = 0;

  // True if memory may be copied from and to the peer's memory directly. copy_from() and copy_to() copy all of it, or
  // return false: the system does not allow that, or the peer has ended.
  virtual bool can_copy() const { return false; }
  virtual bool copy_from(uint64_t, char*, uint64_t) { return false; }
  virtual bool copy_to(uint64_t, const char*, uint64_t) { return false; }
  // True if the system has not allowed one of them.
  virtual bool has_refused() const { return false; }
  // Called when RankBlock::ended of this rank is set: waits until the peer does not write to memory of this process any
  // more. It waits 100 ms at most: the peer may have been killed.
  virtual void await_copies() {}
  // The joint copies of messages to and from the peer; null unless can_copy().
  virtual JointCopy* sent_copy() { return nullptr; }
  virtual JointCopy* received_copy() { return nullptr; }

  // Appends the descriptor that shows that progress() can move something, if there is one.
  virtual void add_to(std::vector<pollfd>*) const {}
  // Returns an error if the host of the peer does not answer.
  virtual Status check_answered() const { return Status(); }
  // Closes this process's descriptors; nothing may be moved any more.
  virtual void close() {}
};

// A stream through a transport.
class MeshStream final : public PeerStream {
 public:
  // `mesh` has one stream only, to `rank`.
  MeshStream(std::unique_ptr<Mesh> mesh, int rank) : mesh_(std::move(mesh)), rank_(rank) {}

  uint64_t send(const void* data, uint64_t num_bytes) override { return mesh_->send(rank_, 0, data, num_bytes); }
  uint64_t receive(void* data, uint64_t num_bytes) override { return mesh_->receive(rank_, 0, data, num_bytes); }
  bool has_sent(uint64_t end) const override { return mesh_->has_sent(rank_, 0, end); }
  bool has_received(uint64_t end) const override { return mesh_->has_received(rank_, 0, end); }
  Status progress(bool* moved) override { return mesh_->progress(moved); }
  bool can_progress() const override { return false; }
  void add_to(std::vector<pollfd>* polled) const override { mesh_->add_to(polled); }
  Status check_answered() const override { return mesh_->check_answered(); }
  void close() override { mesh_->close_in_child(); }

 private:
  const std::unique_ptr<Mesh> mesh_;
  const int rank_;
};

}  // namespace hvl
