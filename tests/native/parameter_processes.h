// Nodes of parameter servers and clients, each as if it were a process of its own, and the ways to connect them.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "connections.h"
#include "parameters/client_array.h"
#include "parameters/node.h"

namespace hvl {

constexpr uint64_t kPatience = 10 * kSecond;

enum class Way { kCopies, kRing, kTcp, kTcpWithMacs };
inline const std::vector<Way> kWays = {Way::kCopies, Way::kRing, Way::kTcp, Way::kTcpWithMacs};

inline PeerConnection tcp_end(int fd, const std::string& peer, bool has_macs, int end) {
  hvl_connection given{fd, 0, HVL_MESSAGES, {}, {}};
  memset(end == 0 ? given.send_key : given.receive_key, 1, HVL_KEY_BYTES);
  memset(end == 0 ? given.receive_key : given.send_key, 2, HVL_KEY_BYTES);
  PeerConnection connection;
  connection.peer = peer;
  std::unique_ptr<Mesh> mesh = make_tcp_transport({given}, false)->make_message_stream(0, peer, &connection.keys);
  connection.stream = std::make_unique<MeshStream>(std::move(mesh), 0);
  if (!has_macs) connection.keys.reset();
  return connection;
}

inline PeerConnection local_end(int fd, const std::string& peer, const std::shared_ptr<HostMemory>& memory, int end,
                                int pid) {
  PeerConnection connection;
  const Status status = PeerConnection::make_local(peer, memory, end, pid, fd, &connection);
  REQUIRE(status.ok());
  return connection;
}

// A mapping of its own for each end.
inline std::shared_ptr<HostMemory> map(int fd) {
  std::shared_ptr<HostMemory> memory;
  REQUIRE(HostMemory::map(fd, PeerConnection::shape(), &memory).ok());
  return memory;
}

// The ends of a connection: the client's first.
struct BothEnds {
  PeerConnection client, server;

  BothEnds(Way way, const std::string& client_name, const std::string& server_name) {
    int ends[2];
    make_pair_of_ends(ends);
    if (way == Way::kTcp || way == Way::kTcpWithMacs) {
      client = tcp_end(ends[0], server_name, way == Way::kTcpWithMacs, 0);
      server = tcp_end(ends[1], client_name, way == Way::kTcpWithMacs, 1);
    } else {
      const int memory = memfd_create("parameters", MFD_CLOEXEC);
      REQUIRE(ftruncate(memory, static_cast<off_t>(HostMemory::bytes_needed(PeerConnection::shape()))) == 0);
      const int pid = way == Way::kCopies ? getpid() : 0;
      client = local_end(ends[0], server_name, map(memory), 0, pid);
      server = local_end(ends[1], client_name, map(memory), 1, pid);
      close(memory);
    }
    for (int end : ends) close(end);
  }
};

// As a process would be.
struct Process {
  HandleTable handles;
  ParameterNode node{&handles};

  int64_t connect(Way way, Process* server, const std::string& name = "a client",
                  const std::string& server_name = "a server") {
    BothEnds ends(way, name, server_name);
    server->node.add_client(std::move(ends.server));
    return node.add_server(std::move(ends.client));
  }
  // As its own server.
  int64_t connect_to_itself(const std::string& server_name = "a server") {
    PeerConnection own;
    own.peer = server_name;
    return node.add_server(std::move(own));
  }
  template <typename Make>
  int64_t start(Make&& make) {
    auto request = std::make_unique<ClientRequest>();
    const Status made = make(request.get());
    CHECK_EQ(made.message(), "");
    int64_t handle = 0;
    CHECK_EQ(node.start(std::move(request), &handle).message(), "");
    return handle;
  }
  Status wait(int64_t handle, uint64_t patience = kPatience) {
    const uint64_t deadline = now_ns() + patience;
    while (handles.wait(handle, deadline) != HVL_OK && now_ns() < deadline) {
    }
    if (!CHECK_EQ(handles.poll(handle), HVL_OK)) return Status(HVL_IN_PROGRESS, "not complete");
    std::vector<hvl_output> outputs;
    return handles.consume(handle, &outputs);
  }
  bool is_done(int64_t handle) { return handles.poll(handle) == HVL_OK; }
};

// An array as a client sees it.
struct Array {
  Process* process;
  std::unique_ptr<ClientArray> array;

  Array(Process* of, const std::vector<hvl_parameters_shard>& shards, int32_t num_clients = 0,
        DataType dtype = HVL_FLOAT32)
      : process(of) {
    const hvl_parameters_array_config config{7, dtype, shards.data(), static_cast<int32_t>(shards.size()), num_clients};
    CHECK_EQ(ClientArray::make(config, &array).message(), "");
  }
  Status create() {
    return process->wait(process->start([&](ClientRequest* request) { return array->create(request); }));
  }
  int64_t send(const Update& update, int64_t offset, const std::vector<float>& values,
               const Conversion& conversion = Conversion()) {
    return process->start([&](ClientRequest* request) {
      return array->send(update, conversion, offset, static_cast<int64_t>(values.size()),
                         reinterpret_cast<const char*>(values.data()), request);
    });
  }
  int64_t receive(int64_t offset, std::vector<float>* values) {
    return process->start([&](ClientRequest* request) {
      return array->receive(offset, static_cast<int64_t>(values->size()), reinterpret_cast<char*>(values->data()),
                            request);
    });
  }
  std::vector<float> all(size_t count) {
    std::vector<float> values(count);
    CHECK_EQ(process->wait(receive(0, &values)).message(), "");
    return values;
  }
  int64_t send_rows(const Update& update, const std::vector<int64_t>& indices, int64_t length,
                    const std::vector<float>& rows) {
    return process->start([&](ClientRequest* request) {
      return array->send_rows(update, Conversion(), {indices.data(), static_cast<int64_t>(indices.size()), length},
                              reinterpret_cast<const char*>(rows.data()), request);
    });
  }
  std::vector<float> rows(const std::vector<int64_t>& indices, int64_t length) {
    std::vector<float> rows(indices.size() * static_cast<size_t>(length));
    CHECK_EQ(process
                 ->wait(process->start([&](ClientRequest* request) {
                   return array->receive_rows({indices.data(), static_cast<int64_t>(indices.size()), length},
                                              reinterpret_cast<char*>(rows.data()), request);
                 }))
                 .message(),
             "");
    return rows;
  }
  template <class T>
  Status state(Command::Kind kind, hvl_state state, std::vector<T>* values) {
    return process->wait(process->start([&](ClientRequest* request) {
      return array->move_state(kind, state, reinterpret_cast<char*>(values->data()), request);
    }));
  }
  int64_t tick(int64_t staleness) {
    return process->start([&](ClientRequest* request) { return array->tick(staleness, request); });
  }
};

inline const Update kAdd{Rule::kAdd, {}}, kCopy{Rule::kCopy, {}}, kZero{Rule::kZero, {}};

inline std::vector<float> counted(size_t count, float first = 0) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = first + static_cast<float>(i % 4001);
  return values;
}

}  // namespace hvl
