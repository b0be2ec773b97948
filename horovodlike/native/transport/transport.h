// The seam between hosts: collectives and the control plane move bytes through these three interfaces only. Each
// transport is in a folder of its own, later in the build order than its users, so that none of them can include it;
// transport_test.cc checks each.
//
// Only the thread that holds the engine lock may use it. No function waits: the caller repeats pump() or progress(),
// and sleeps on the descriptors meanwhile. An error means that the job is broken, names the peer, and is final.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/status.h"
#include "sync/poller.h"

namespace hvl {

constexpr size_t kFrameLimit = size_t{16} << 20;  // bytes of the longest frame

// Control frames to and from one rank of another host, each delivered whole, once and in order. Both sides call
// finish() before they destroy it: else the peer takes this rank for killed, and its last frames may be lost.
class Connection {
 public:
  virtual ~Connection() = default;

  // Queues a frame, of kFrameLimit bytes at most: with a longer one the connection fails. Not after finish().
  virtual void send(const std::string& frame) = 0;
  // Queues the end of the frames: nothing may be sent after it.
  virtual void finish() = 0;
  // Sends as much as possible and receives a bounded part of the arrived bytes, unless a received frame waits; sets
  // *progressed if anything moved. A lost peer is an error only after receive() has returned its last frame.
  virtual Status pump(bool* progressed) = 0;
  // Returns the next frame in *frame, if there is one.
  virtual bool receive(std::string* frame) = 0;
  // Closes this process's descriptor; pump() must not be called any more.
  virtual void close() = 0;

  // None of these makes a system call.
  virtual bool has_frame() const = 0;
  // True if the peer has finished and receive() has returned all its frames.
  virtual bool has_ended() const = 0;
  // True if nothing more will be sent or received: both sides have finished, or the connection has failed.
  virtual bool is_over() const = 0;
  // True if all that was queued has left this process, the end too.
  virtual bool is_flushed() const = 0;
  // The descriptor to sleep on: readable when something has arrived, writable when more can be sent. -1 when the
  // connection is over and the peer has closed it, too.
  virtual int fd() const = 0;
  // The name of the peer in texts to the user: "rank 2 on host b".
  virtual const std::string& peer() const = 0;
};

// The bytes of collectives to and from every rank of another host: memory to send and memory to receive into, in an
// order that both sides know. Between two ranks there may be several streams, with no order among them. Positions count
// the bytes of a stream's direction. As Sockets, it lists only streams that have something to move. A lost peer is an
// error only for transfers with it.
class Mesh : public Sockets {
 public:
  // Queues memory, which is borrowed until all of it has been moved. Returns the position of its end in the stream.
  // `turn` selects a stream: it is the number of the piece of data, which both sides know. There is one call for each
  // chunk or tensor, so it may be virtual.
  virtual uint64_t send(int rank, uint64_t turn, const void* data, uint64_t num_bytes) = 0;
  virtual uint64_t receive(int rank, uint64_t turn, void* data, uint64_t num_bytes) = 0;
  virtual bool has_sent(int rank, uint64_t turn, uint64_t end) const = 0;
  virtual bool has_received(int rank, uint64_t turn, uint64_t end) const = 0;
  // True if everything queued has been moved.
  virtual bool is_idle() const = 0;
  // Moves as much as possible without waiting; sets *moved if anything moved.
  virtual Status progress(bool* moved) = 0;
  // Closes this process's descriptors, in a forked child; nothing may be moved any more.
  virtual void close_in_child() = 0;
};

// The keys of the MACs of both directions of a connection, as seen from this rank.
struct MessageKeys {
  uint8_t send[HVL_KEY_BYTES];
  uint8_t receive[HVL_KEY_BYTES];
};

// Makes the connections of this rank to ranks of other hosts. Its functions throw std::runtime_error on a system error.
class Transport {
 public:
  virtual ~Transport() = default;

  // The control connection to that rank. `peer`: its name, for errors.
  virtual std::unique_ptr<Connection> connect(int rank, const std::string& peer) = 0;
  virtual std::unique_ptr<Mesh> make_mesh(const std::function<std::string(int rank)>& name_of) = 0;
  // A mesh of one stream to that rank alone, for messages. *keys: set to the keys for MACs of the message headers;
  // unchanged if the stream has MACs of its own.
  virtual std::unique_ptr<Mesh> make_message_stream(int rank, const std::string& peer,
                                                    std::optional<MessageKeys>* keys) = 0;
};

}  // namespace hvl
