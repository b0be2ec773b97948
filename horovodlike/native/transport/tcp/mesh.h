// The data connections of this rank: one or several streams to every rank of another host.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sync/poller.h"
#include "transport/tcp/stream.h"

namespace hvl {

class Mesh : public Sockets {
 public:
  explicit Mesh(int size) : streams_(static_cast<size_t>(size)) {}

  // Takes ownership of a descriptor: the next stream to that rank. `peer` is its name for messages. `seal`: as in
  // Stream.
  void add(int rank, int fd, const std::string& peer, std::unique_ptr<DataSeal> seal = nullptr);

  // `turn` chooses among several streams: the number of the piece of data, which both sides know.
  uint64_t send(int rank, uint64_t turn, const void* data, uint64_t num_bytes) {
    Stream& stream = at(rank, turn);
    if (num_bytes > 0) use(&stream);
    return stream.send(data, num_bytes);
  }
  uint64_t receive(int rank, uint64_t turn, void* data, uint64_t num_bytes) {
    Stream& stream = at(rank, turn);
    if (num_bytes > 0) use(&stream);
    return stream.receive(data, num_bytes);
  }
  bool has_sent(int rank, uint64_t turn, uint64_t end) const { return at(rank, turn).has_sent(end); }
  bool has_received(int rank, uint64_t turn, uint64_t end) const { return at(rank, turn).has_received(end); }
  // True if everything queued has been moved.
  bool is_idle() const { return active_.empty(); }

  void close_in_child();

  // Moves as much as possible without waiting; sets *moved if anything moved.
  Status progress(bool* moved);

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
  std::vector<Stream*> active_;                                // that have something to move
};

}  // namespace hvl
