// One connection of a node: to a client of this process's shards, or to a server.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "parameters/client_session.h"
#include "parameters/server_session.h"
#include "shm/host_memory.h"

namespace hvl {

// The end of a connection that this process has.
struct PeerConnection {
  std::string peer;  // its name, for errors and the log
  std::unique_ptr<PeerStream> stream;
  std::optional<MessageKeys> keys;
  // If the stream is in shared memory: that memory, this process's place in it, and a socket that wakes the peer, and
  // shows when it ends.
  std::shared_ptr<HostMemory> memory;
  int local_rank = 0;
  int socket = -1;

  // A stream in shared memory. The socket is duplicated. `pid`: as in ShmStream.
  static Status make_local(std::string peer, std::shared_ptr<HostMemory> memory, int local_rank, int pid, int socket,
                           PeerConnection* connection);
  // The shared memory that a connection needs.
  static HostShape shape() { return HostShape{2, 4096, 1}; }
  // For a forked child: closes its descriptors.
  void close_in_child();
};

// For the node's thread.
class NodePeer {
 public:
  NodePeer(PeerConnection connection, ShardStore* store, std::function<void(NodePeer*)> on_ticked);
  NodePeer(PeerConnection connection, int64_t server, ClientSession::OnEnd on_end);
  ~NodePeer();
  NodePeer(const NodePeer&) = delete;
  NodePeer& operator=(const NodePeer&) = delete;

  const std::string& name() const { return connection_.peer; }
  ClientSession* client() const { return client_; }  // null: the peer is a client
  int64_t server() const { return server_; }         // the number of the server; 0: the peer is a client
  bool is_local() const { return connection_.memory != nullptr; }
  bool has_left() const { return served_ != nullptr && served_->has_left(); }
  int fd() const { return fd_; }

  // Moves bytes, and handles what has come. An error ends the connection.
  Status progress(bool* progressed);
  bool can_progress() const { return session_->can_progress() || (client_ != nullptr && client_->can_call()); }
  // True if room in the socket must be waited for.
  bool waits_for_room() const { return !is_local() && session_->is_sending(); }
  // The socket has input. An error: the peer has ended.
  Status take_input();
  // Of a peer of this host: whether it wakes this process for what it does.
  void arm();
  void disarm() { doorbell().disarm(); }
  // Returns an error if the host of the peer does not answer.
  Status check_answered() const { return session_->stream().check_answered(); }
  // Tells a server that this client leaves, and waits for a short time until that has been sent.
  void leave();
  // Ends the session, and all commands that have not ended with an error.
  void end(const Status& why);
  void close_in_child() { connection_.close_in_child(); }

  bool is_ready = false;      // in the list of those that can make progress
  bool watches_room = false;  // as the epoll knows it

 private:
  Doorbell& doorbell() const { return connection_.memory->rank(connection_.local_rank).doorbell; }

  PeerConnection connection_;  // its stream is the session's
  std::unique_ptr<Session> session_;
  ClientSession* client_ = nullptr;
  ServerSession* served_ = nullptr;
  int64_t server_ = 0;
  int fd_ = -1;
};

}  // namespace hvl
