// The connections between the hosts of a job whose ranks are engines of one process: pairs of sockets or pipes of
// memory, and the pipes that wake ranks.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include "check.h"
#include "engine/engine.h"
#include "memory_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace hvl {

// Makes the two ends of a connection.
using MakeEnds = std::function<void(int* ends)>;

inline void make_pair_of_ends(int* ends) {
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
}

inline void make_tcp_ends(int* ends) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* any = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(bind(listener, any, length) == 0 && listen(listener, 1) == 0 && getsockname(listener, any, &length) == 0);
  ends[0] = socket(AF_INET, SOCK_STREAM, 0);
  REQUIRE(connect(ends[0], any, length) == 0);
  ends[1] = accept(listener, nullptr, nullptr);
  REQUIRE(ends[1] >= 0);
  close(listener);
  for (int end : {ends[0], ends[1]}) REQUIRE(fcntl(end, F_SETFL, O_NONBLOCK) == 0);
}

// How hosts are connected.
struct Wiring {
  int num_streams = 1;  // of each pair of ranks
  bool seals_data = false;
  MakeEnds data_ends = make_pair_of_ends;
  MakeEnds control_ends = make_pair_of_ends;
  size_t pipe_bytes = 0;  // 0: sockets; else pipes of memory, of that size, instead of them
};

inline Wiring in_memory(int num_streams = 1, size_t pipe_bytes = size_t{64} << 10) {
  Wiring wiring;
  wiring.num_streams = num_streams;
  wiring.pipe_bytes = pipe_bytes;
  return wiring;
}

class Connections {
 public:
  explicit Connections(const EngineOptions& options, const Wiring& wiring = Wiring()) : wiring_(wiring) {
    const std::vector<int>& hosts = options.hosts;
    for (int rank = 0; rank < options.size; ++rank) {
      int ends[2];
      REQUIRE(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
      pipes_.push_back({ends[0], ends[1]});
    }
    if (wiring.pipe_bytes > 0) {
      memory_ = std::make_shared<MemoryNetwork>(options.size, wiring.num_streams, wiring.pipe_bytes);
      return;
    }
    std::map<int, int> leaders;  // by host
    for (int rank = options.size - 1; rank >= 0; --rank) leaders[hosts[static_cast<size_t>(rank)]] = rank;
    for (int a = 0; a < options.size; ++a) {
      for (int b = a + 1; b < options.size; ++b) {
        if (hosts[static_cast<size_t>(a)] == hosts[static_cast<size_t>(b)]) continue;
        for (int stream = 0; stream < wiring.num_streams; ++stream) connect(a, b, HVL_DATA, wiring.data_ends);
        connect(a, b, HVL_MESSAGES, wiring.data_ends);
      }
    }
    for (const auto& [host, leader] : leaders) {
      if (host > 0) connect(leaders.at((host - 1) / options.fan_out), leader, HVL_CONTROL, wiring.control_ends);
    }
  }
  ~Connections() {
    for (auto& [rank, connections] : by_rank_) {
      for (hvl_connection& connection : connections) close(connection.fd);
    }
    for (const auto& [from, to] : pipes_) {
      close(from);
      close(to);
    }
  }
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // Its functions must be called while this lives.
  std::shared_ptr<Transport> transport_of(int rank) const {
    if (memory_ != nullptr) return std::make_shared<MemoryTransport>(memory_, rank);
    return make_tcp_transport(by_rank_.at(rank), wiring_.seals_data);
  }
  // Also those that the engine has duplicated.
  void shut_down(int rank) const {
    if (memory_ != nullptr) return memory_->cut_off(rank);
    for (const hvl_connection& connection : by_rank_.at(rank)) shutdown(connection.fd, SHUT_RDWR);
  }
  int wakeup_fd(int rank) const { return pipes_[static_cast<size_t>(rank)].first; }
  std::vector<int> wakeup_fds_of(const std::vector<int>& hosts, int host) const {
    std::vector<int> fds;
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
      if (hosts[rank] == host) fds.push_back(pipes_[rank].second);
    }
    return fds;
  }

 private:
  void connect(int a, int b, hvl_use use, const MakeEnds& make_ends) {
    int ends[2];
    make_ends(ends);
    hvl_connection of_a{ends[0], b, use, {}, {}};
    hvl_connection of_b{ends[1], a, use, {}, {}};
    memset(of_a.send_key, a + 1, sizeof of_a.send_key);
    memset(of_b.receive_key, a + 1, sizeof of_b.receive_key);
    memset(of_a.receive_key, b + 101, sizeof of_a.receive_key);
    memset(of_b.send_key, b + 101, sizeof of_b.send_key);
    by_rank_[a].push_back(of_a);
    by_rank_[b].push_back(of_b);
  }

  const Wiring wiring_;
  std::shared_ptr<MemoryNetwork> memory_;  // null: sockets
  std::map<int, std::vector<hvl_connection>> by_rank_;
  std::vector<std::pair<int, int>> pipes_;  // by rank: the ends to read from and to write to
};

}  // namespace hvl
