// The parameter servers and clients of a process: one thread that moves the bytes of all its connections.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "parameters/client_request.h"
#include "parameters/node_loop.h"
#include "queue/handle_table.h"

namespace hvl {

// Any thread. Nothing waits but stop().
class ParameterNode {
 public:
  // `handles` must live longer. Throws std::runtime_error on a system error.
  explicit ParameterNode(HandleTable* handles);
  ~ParameterNode();
  ParameterNode(const ParameterNode&) = delete;
  ParameterNode& operator=(const ParameterNode&) = delete;

  void add_client(PeerConnection connection);
  // Returns the number of the server.
  int64_t add_server(PeerConnection connection);
  void remove_server(int64_t server);
  void set_user_rules(const UserRules& rules);
  // Begins a request. Fails after stop().
  Status start(std::unique_ptr<ClientRequest> request, int64_t* handle);
  // Ends all sessions, requests and the thread. Later calls do nothing.
  void stop();

  // Around fork(), so that no other thread changes the connections meanwhile.
  void lock();
  void unlock();
  // In a child: closes the descriptors, with the locks held.
  void close_in_child();

 private:
  // Requests of other threads. The calls of a kind are in their order; requests come last.
  struct Calls {
    std::vector<std::pair<PeerConnection, int64_t>> connections;  // and the server's number; 0: the peer is a client
    std::vector<std::function<void()>> functions;
    std::vector<std::unique_ptr<ClientRequest>> requests;
  };

  // False: the node has stopped.
  template <typename Add>
  bool call(Add&& add);

  // The node's thread.
  void run();
  void take_calls(bool is_last);
  bool has_work();
  void sleep();

  HandleTable& handles_;
  const int call_;           // an eventfd
  std::mutex mutex_;         // peers_mutex_ may be taken within it
  Calls calls_;              // guarded by mutex_
  bool is_stopped_ = false;  // likewise
  std::atomic<bool> has_calls_{false};
  std::atomic<bool> is_asleep_{false};
  std::atomic<bool> must_stop_{false};
  std::atomic<int64_t> next_server_{1};
  std::mutex peers_mutex_;  // a leaf lock
  NodeLoop loop_;           // the node's thread
  bool is_dense_ = false;   // the node's thread: the last sleep was so short that spinning is better
  std::thread thread_;
};

}  // namespace hvl
