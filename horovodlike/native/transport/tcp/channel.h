// Authenticated frames over a connected non-blocking TCP socket. The counterpart of shm/ring_buffer.h between hosts.
//
// One thread at a time. To sleep, poll fd(): for reading until has_ended(), for writing until is_flushed(). A
// connection ends cleanly with finish() on both sides, and neither destroys its channel before is_over(): if a socket
// with unread bytes is closed, data that the kernel has not delivered is lost.
#pragma once

#include <string>

#include "base/status.h"
#include "transport/tcp/seal.h"

namespace hvl {

class Channel {
 public:
  // Owns the descriptor. The keys are those of the two directions; the other side passes them in the opposite order.
  // `peer` names it in messages: "rank 2 (host b, 10.0.0.3)".
  Channel(int fd, const ChannelKey& send_key, const ChannelKey& receive_key, std::string peer);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Queues a frame, of kFrameLimit bytes at most: with a longer one the channel fails. Not after finish().
  void send(const std::string& frame);
  // Queues the end, and closes this direction as soon as the kernel has taken all.
  void finish();
  // Writes as much as the kernel takes and reads some of the available bytes, unless a received frame is waiting; sets
  // *progressed if anything moved. An error is final: no frames follow. A lost peer is an error only after receive()
  // has returned its last frame.
  Status pump(bool* progressed);
  // Closes the socket; pump() must not be called any more.
  void close();
  // Returns the next frame in *frame, if there is one.
  bool receive(std::string* frame) { return opener_.receive(frame); }

  // None of these makes a system call.
  bool has_frame() const { return opener_.has_frame(); }
  // True if the peer has finished and receive() has returned all its frames.
  bool has_ended() const { return opener_.is_at_end() && !has_frame(); }
  // True if nothing more will be sent or received: both sides have finished, or the channel has failed.
  bool is_over() const { return !failure_.ok() || (half_closed_ && has_ended()); }
  // The kernel has taken all that was queued.
  bool is_flushed() const { return outbox_.empty() && finishing_ == half_closed_; }
  // -1 when it is over and the peer has closed it, too.
  int fd() const { return fd_; }
  const std::string& peer() const { return peer_; }

 private:
  Status move(bool* progressed);
  Status write(bool* progressed);
  Status read(bool* progressed);
  Status lost(int error);

  int fd_;
  const std::string peer_;
  Sealer sealer_;
  Opener opener_;
  ByteQueue outbox_;
  bool finishing_ = false;
  bool half_closed_ = false;
  bool is_gone_ = false;  // the peer
  Status failure_;
};

}  // namespace hvl
