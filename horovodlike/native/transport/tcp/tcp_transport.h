// The transport over TCP: control channels, and a mesh of one or several streams to every rank of another host. Python
// has connected the sockets.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hvl.h"
#include "transport/tcp/stream.h"
#include "transport/transport.h"

namespace hvl {

class TcpMesh final : public Mesh {
 public:
  // Takes ownership of a descriptor: the next stream to that rank. `peer` is its name for messages. `seal`: as in
  // Stream.
  void add(int rank, int fd, const std::string& peer, std::unique_ptr<DataSeal> seal = nullptr);

  uint64_t send(int rank, uint64_t turn, const void* data, uint64_t num_bytes) override {
    Stream& stream = at(rank, turn);
    if (num_bytes > 0) use(&stream);
    return stream.send(data, num_bytes);
  }
  uint64_t receive(int rank, uint64_t turn, void* data, uint64_t num_bytes) override {
    Stream& stream = at(rank, turn);
    if (num_bytes > 0) use(&stream);
    return stream.receive(data, num_bytes);
  }
  bool has_sent(int rank, uint64_t turn, uint64_t end) const override { return at(rank, turn).has_sent(end); }
  bool has_received(int rank, uint64_t turn, uint64_t end) const override { return at(rank, turn).has_received(end); }
  bool is_idle() const override { return active_.empty(); }
  Status progress(bool* moved) override;
  void close_in_child() override;

  void add_to(std::vector<pollfd>* polled) const override;
  std::string awaited() const override;
  Status check_answered() const override;

 private:
  Stream& at(int rank, uint64_t turn) const {
    const auto& streams = streams_[static_cast<size_t>(rank)];
    return *streams[streams.size() == 1 ? 0 : turn % streams.size()];
  }
  void use(Stream* stream) {
    if (stream->is_idle()) active_.push_back(stream);
  }

  std::vector<std::vector<std::unique_ptr<Stream>>> streams_;  // by rank
  std::vector<Stream*> active_;                                // streams that have something to move
};

// `connections`: their descriptors are duplicated when the transport's functions are called. `seals_data`: the data is
// authenticated, as control always is.
std::shared_ptr<Transport> make_tcp_transport(std::vector<hvl_connection> connections, bool seals_data);

}  // namespace hvl
