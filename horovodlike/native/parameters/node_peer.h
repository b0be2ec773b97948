// One connection of a node: to a client of this process's shards, or to a server.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "parameters/client_session.h"
#include "parameters/own_client.h"
#include "parameters/server_session.h"
#include "shm/host_memory.h"

namespace hvl {

// The rest of a connection whose stream is in shared memory. Owns the socket.
struct LocalEnd {
  std::shared_ptr<HostMemory> memory;
  int local_rank;  // this process's rank in the memory
  int socket;      // wakes the peer, and shows when it ends

  ~LocalEnd() { close(); }
  LocalEnd(const LocalEnd&) = delete;
  LocalEnd& operator=(const LocalEnd&) = delete;
  void close();
};

// The end of a connection that this process has.
struct PeerConnection {
  std::string peer;  // its name, for errors and the log
  std::unique_ptr<PeerStream> stream;
  std::optional<MessageKeys> keys;
  std::unique_ptr<LocalEnd> local;  // null: the stream has a descriptor

  // True if there is none: this process is its own server.
  bool is_own() const { return stream == nullptr; }
  // A stream in shared memory. The socket is duplicated. `pid`: as in ShmStream.
  static Status make_local(std::string peer, std::shared_ptr<HostMemory> memory, int local_rank, int pid, int socket,
                           PeerConnection* connection);
  // The shared memory that a connection needs.
  static HostShape shape() { return HostShape{2, 4096, 1}; }
  // Closes the descriptors in a forked child.
  void close_in_child();
};

// Only the node's thread may use it.
class NodePeer {
 public:
  // `notify` is called when progress() has something to do.
  using Notify = std::function<void(NodePeer*)>;

  // A client.
  NodePeer(PeerConnection connection, ShardStore* store, Notify notify);
  // A server. `store`: used if the server is this process itself.
  NodePeer(PeerConnection connection, int64_t server, ShardStore* store, ClientCommand::OnEnd on_end, Notify notify);
  NodePeer(const NodePeer&) = delete;
  NodePeer& operator=(const NodePeer&) = delete;

  const std::string& name() const { return own_ != nullptr ? own_->server() : session_->peer(); }
  int64_t server() const { return server_; }  // the number of the server; 0: the peer is a client
  bool is_local() const { return local_ != nullptr; }
  bool has_left() const { return served_ != nullptr && served_->has_left(); }
  int fd() const { return fd_; }  // -1: none

  // Takes a command for the server.
  void call(ClientCommand* command) { own_ != nullptr ? own_->call(command) : client_->call(command); }
  // Moves bytes, and handles those that have come. An error ends the connection.
  Status progress(bool* progressed);
  bool can_progress() const;
  // True if room in the socket must be waited for.
  bool waits_for_room() const { return fd_ != -1 && !is_local() && session_->is_sending(); }
  // The socket has input. An error: the peer has ended.
  Status take_input();
  // From now on, until disarm(), a peer on this host wakes this process after each change.
  void arm();
  void disarm() { doorbell().disarm(); }
  // Returns an error if the host of the peer does not answer.
  Status check_answered() const { return own_ != nullptr ? Status() : session_->stream().check_answered(); }
  // Tells a server that this client leaves, and waits for a short time until that has been sent.
  void leave();
  // Ends the session, and all commands that have not ended with an error.
  void end(const Status& why);
  // Closes the descriptors in a forked child.
  void close_in_child();

  bool is_ready = false;      // in the list of those that can make progress
  bool watches_room = false;  // as the epoll knows it

 private:
  RankBlock& block() const { return local_->memory->rank(local_->local_rank); }
  Doorbell& doorbell() const { return block().doorbell; }
  int find_fd() const;

  std::unique_ptr<LocalEnd> local_;  // set for a peer on this host
  std::unique_ptr<OwnClient> own_;   // the server is this process, and there is no session
  std::unique_ptr<Session> session_;
  ClientSession* client_ = nullptr;
  ServerSession* served_ = nullptr;
  int64_t server_ = 0;
  int fd_ = -1;
};

}  // namespace hvl
