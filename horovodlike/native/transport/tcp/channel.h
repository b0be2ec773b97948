// Authenticated frames over a connected non-blocking TCP socket. If a socket with unread bytes is closed, data that the
// kernel has not delivered is lost.
#pragma once

#include <string>

#include "base/status.h"
#include "transport/tcp/seal.h"
#include "transport/transport.h"

namespace hvl {

class Channel final : public Connection {
 public:
  // Owns the descriptor. Each direction has its key; the other side passes the keys in the opposite order.
  Channel(int fd, const ChannelKey& send_key, const ChannelKey& receive_key, std::string peer);
  ~Channel() override;
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  void send(const std::string& frame) override;
  // Closes this direction as soon as the kernel has taken all.
  void finish() override;
  Status pump(bool* progressed) override;
  void close() override;
  bool receive(std::string* frame) override { return opener_.receive(frame); }

  bool has_frame() const override { return opener_.has_frame(); }
  bool has_ended() const override { return opener_.is_at_end() && !has_frame(); }
  bool is_over() const override { return !failure_.ok() || (half_closed_ && has_ended()); }
  bool is_flushed() const override { return outbox_.empty() && finishing_ == half_closed_; }
  int fd() const override { return fd_; }
  const std::string& peer() const override { return peer_; }

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
