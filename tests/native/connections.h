// The connections between the hosts of a job whose ranks are engines of one process: pairs of sockets, and pipes.
#pragma once

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include "check.h"
#include "engine/engine.h"

namespace hvl {

// Makes the two ends of a connection for data.
using MakeEnds = std::function<void(int* ends)>;

inline void make_pair_of_ends(int* ends) {
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
}

class Connections {
 public:
  // `num_streams`: of each pair of ranks.
  explicit Connections(const EngineOptions& options, int num_streams = 1, MakeEnds data_ends = make_pair_of_ends)
      : data_ends_(std::move(data_ends)) {
    const std::vector<int>& hosts = options.hosts;
    for (int rank = 0; rank < options.size; ++rank) {
      int ends[2];
      REQUIRE(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
      pipes_.push_back({ends[0], ends[1]});
    }
    std::map<int, int> leaders;  // by host
    for (int rank = options.size - 1; rank >= 0; --rank) leaders[hosts[static_cast<size_t>(rank)]] = rank;
    for (int a = 0; a < options.size; ++a) {
      for (int b = a + 1; b < options.size; ++b) {
        if (hosts[static_cast<size_t>(a)] == hosts[static_cast<size_t>(b)]) continue;
        for (int stream = 0; stream < num_streams; ++stream) connect(a, b, HVL_DATA);
      }
    }
    for (const auto& [host, leader] : leaders) {
      if (host > 0) connect(leaders.at((host - 1) / options.fan_out), leader, HVL_CONTROL);
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

  std::vector<hvl_connection> of(int rank) const { return by_rank_.at(rank); }
  // Also of those that the engine has duplicated.
  void shut_down(int rank) const {
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
  void connect(int a, int b, hvl_use use) {
    int ends[2];
    use == HVL_DATA ? data_ends_(ends) : make_pair_of_ends(ends);
    hvl_connection of_a{ends[0], b, use, {}, {}};
    hvl_connection of_b{ends[1], a, use, {}, {}};
    memset(of_a.send_key, a + 1, sizeof of_a.send_key);
    memset(of_b.receive_key, a + 1, sizeof of_b.receive_key);
    memset(of_a.receive_key, b + 101, sizeof of_a.receive_key);
    memset(of_b.send_key, b + 101, sizeof of_b.send_key);
    by_rank_[a].push_back(of_a);
    by_rank_[b].push_back(of_b);
  }

  const MakeEnds data_ends_;
  std::map<int, std::vector<hvl_connection>> by_rank_;
  std::vector<std::pair<int, int>> pipes_;  // by rank: the ends to read from and to write to
};

}  // namespace hvl
