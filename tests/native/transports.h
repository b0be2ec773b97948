// All transports, for tests that run over each of them.
#pragma once

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "connections.h"

namespace hvl {

// Calls function(wiring) for each transport, and reports over which one a check has failed.
template <typename Function>
void on_each_transport(Function&& function) {
  Wiring sealed, tcp;
  sealed.seals_data = true;
  tcp.data_ends = tcp.control_ends = [](int* ends) {
    make_tcp_ends(ends);
    const int most = 1 << 20;  // the kernel may take much more by itself
    for (int end : {ends[0], ends[1]}) {
      for (int buffer : {SO_SNDBUF, SO_RCVBUF}) setsockopt(end, SOL_SOCKET, buffer, &most, sizeof most);
    }
  };
  tcp.num_streams = 2;
  struct Named {
    const char* name;
    Wiring wiring;
  };
  for (const Named& each :
       {Named{"pairs of sockets", Wiring()}, Named{"pairs of sockets with sealed data", sealed}, Named{"TCP", tcp},
        Named{"memory", in_memory(1, 65536)}, Named{"memory in small pieces", in_memory(3, 1009)}}) {
    const int before = check::num_failures;
    function(each.wiring);
    if (check::num_failures != before) std::fprintf(stderr, "  over %s\n", each.name);
  }
}

// Ranks on hosts of their own. Rank 0 has a control connection to each other one.
class RemoteRanks {
 public:
  RemoteRanks(int size, const Wiring& wiring) : connections_(std::make_unique<Connections>(options_of(size), wiring)) {}

  static std::string name_of(int rank) { return "rank " + std::to_string(rank); }
  std::unique_ptr<Connection> connect(int from, int to) {
    return connections_->transport_of(from)->connect(to, name_of(to));
  }
  std::unique_ptr<Mesh> mesh_of(int rank) { return connections_->transport_of(rank)->make_mesh(name_of); }
  std::unique_ptr<Mesh> message_stream(int from, int to, std::optional<MessageKeys>* keys) {
    return connections_->transport_of(from)->make_message_stream(to, name_of(to), keys);
  }
  // As if the network of a rank were gone.
  void cut_off(int rank) { connections_->shut_down(rank); }
  // Nothing but what was made holds the connections from now on, so they close with it.
  void drop() { connections_ = nullptr; }

 private:
  static EngineOptions options_of(int size) {
    EngineOptions options;
    options.size = size;
    options.fan_out = size;
    options.hosts.resize(static_cast<size_t>(size));
    std::iota(options.hosts.begin(), options.hosts.end(), 0);
    return options;
  }

  std::unique_ptr<Connections> connections_;
};

}  // namespace hvl
