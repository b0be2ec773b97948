// The work of a node's thread: the sessions with all peers, and the requests of this process.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "parameters/client_request.h"
#include "parameters/node_peer.h"
#include "parameters/shard_store.h"
#include "queue/handle_table.h"

namespace hvl {

// Only the node's thread may use it, except close_in_child().
class NodeLoop {
 public:
  // `call`: a descriptor that ends a sleep when it is readable. `peers_mutex` is held while peers are removed, and
  // by the callers of add_client() and add_server().
  // Throws std::runtime_error on a system error.
  NodeLoop(HandleTable* handles, int call, std::mutex* peers_mutex);
  ~NodeLoop();
  NodeLoop(const NodeLoop&) = delete;
  NodeLoop& operator=(const NodeLoop&) = delete;

  void add_client(PeerConnection connection);
  void add_server(PeerConnection connection, int64_t server);
  void remove_server(int64_t server);
  void set_user_rules(const UserRules& rules) { store_.set_user_rules(rules); }
  void begin(std::unique_ptr<ClientRequest> request);
  // Ends all sessions, and the requests with them.
  void stop();

  // Progresses the sessions that can; false: nothing could be done.
  bool progress();
  bool can_progress() const;
  // Finds the peers whose sockets are ready; waits for them, or for a call, `milliseconds` at most.
  void find_ready(int milliseconds);
  // Between arm() and disarm(), peers on this host end a sleep when they change something.
  void arm();
  void disarm();
  void check_answered();
  // In a forked child, in which this thread does not exist: closes the descriptors.
  void close_in_child();

 private:
  struct Server {
    NodePeer* peer = nullptr;  // null: the connection has ended
    Status ended;
  };

  Status call_server(ClientCommand* command);
  void add(std::unique_ptr<NodePeer> peer);
  void mark_ready(NodePeer* peer);
  void progress(NodePeer* peer, bool* progressed);
  void watch(NodePeer* peer, int operation);
  void drop(NodePeer* peer, const Status& why);
  void end(ClientCommand* command, const Status& status);
  void complete(ClientRequest* request);

  HandleTable& handles_;
  const int epoll_;
  std::mutex& peers_mutex_;
  ShardStore store_;
  std::vector<std::unique_ptr<NodePeer>> peers_;
  std::vector<NodePeer*> local_;  // those on this host
  std::vector<NodePeer*> ready_;
  std::vector<std::pair<NodePeer*, Status>> failed_;
  std::unordered_map<int64_t, Server> servers_;  // by number
  bool has_completed_ = false;                   // some handles, whose threads have not been woken
};

}  // namespace hvl
