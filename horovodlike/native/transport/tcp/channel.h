// Authenticated frames over a connected TCP socket that is never waited for. The counterpart of shm/ring_buffer.h
// between hosts.
//
// One thread at a time. Who sleeps polls fd(): to read until has_ended(), to write until is_flushed(). In good order a
// connection ends with finish() on both sides, and neither destroys its channel before is_over(): what the kernel has
// not delivered when a socket with unread bytes is closed is lost.
#pragma once

#include <string>

#include "base/status.h"
#include "transport/tcp/seal.h"

namespace hvl {

class Channel {
 public:
  // Takes the descriptor, and closes it in the end. The keys are those of the two directions; the other side has them
  // the other way round. `peer` names it in messages: "rank 2 (host b, 10.0.0.3)".
  Channel(int fd, const ChannelKey& send_key, const ChannelKey& receive_key, std::string peer);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Queues a frame, of kFrameLimit bytes at most: with a longer one the channel fails. Not after finish().
  void send(const std::string& frame);
  // Queues the end, and closes this direction as soon as the kernel has taken all.
  void finish();
  // Hands the kernel what it takes and reads some of what is there, unless a frame waits to be handed out; sets
  // *progressed if anything moved. An error says what is wrong and is final, and there are no frames after it. That
  // the peer is gone is an error only after its last frame was handed out.
  Status pump(bool* progressed);
  // Nothing may be pumped any more.
  void close();
  // Hands out the next frame.
  bool receive(std::string* frame) { return opener_.receive(frame); }

  // None of these asks the kernel.
  bool has_frame() const { return opener_.has_frame(); }
  // The peer has finished, and all its frames were handed out.
  bool has_ended() const { return opener_.is_at_end() && !has_frame(); }
  // Nothing more goes or comes: both sides have finished, or it has failed.
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
