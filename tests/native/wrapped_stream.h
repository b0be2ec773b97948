// A stream through another one, for tests that change a part of what it does.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "p2p/peer_stream.h"

namespace hvl {

class WrappedStream : public PeerStream {
 public:
  explicit WrappedStream(std::unique_ptr<PeerStream> stream) : stream_(std::move(stream)) {}

  uint64_t send(const void* data, uint64_t num_bytes) override { return stream_->send(data, num_bytes); }
  uint64_t receive(void* data, uint64_t num_bytes) override { return stream_->receive(data, num_bytes); }
  bool has_sent(uint64_t end) const override { return stream_->has_sent(end); }
  bool has_received(uint64_t end) const override { return stream_->has_received(end); }
  Status progress(bool* moved) override { return stream_->progress(moved); }
  bool can_progress() const override { return stream_->can_progress(); }
  void add_to(std::vector<pollfd>* polled) const override { stream_->add_to(polled); }
  void close() override { stream_->close(); }

 private:
  const std::unique_ptr<PeerStream> stream_;
};

}  // namespace hvl
