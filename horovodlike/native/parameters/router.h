// The way of a client's commands to shards that two servers have: when one of them is lost, they go to another one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "parameters/client_request.h"

namespace hvl {

// The servers that have the shards of an array, as far as a client knows. The node's thread changes it.
struct ShardRoutes {
  struct Route {
    size_t at = 0;  // in the ring
    uint32_t view = 1;
    size_t num_under_way = 0;
    bool is_moving = false;           // the commands wait until those under way have ended
    bool resumes = false;             // the next command is the first one after those that were refused
    uint64_t search_began = 0;        // for the server that has the shard; 0: no search is under way
    uint64_t deadline = 0;            // of the search
    size_t num_tried = 0;             // servers, in this round of the search
    size_t num_rounds = 0;            // of the search
    Status why;                       // the last error
    std::vector<RequestPiece*> held;  // commands that wait
  };

  uint64_t ring = 0;
  uint64_t patience = 0;
  std::vector<int64_t> servers;  // the ring
  std::vector<Route> shards;
};

// For the node's thread.
class Router {
 public:
  // Gives a command to a server; false: there is no connection to it.
  using Call = std::function<bool(int64_t server, RequestPiece* piece)>;
  using End = std::function<void(RequestPiece* piece, const Status& status)>;

  Router(Call call, End end) : call_(std::move(call)), end_(std::move(end)) {}

  void begin(RequestPiece* piece);
  // A command has ended at a server.
  void on_end(RequestPiece* piece, const Status& status);
  // Continues searches that found no server. Called now and then.
  void retry();
  bool is_used() const { return next_sequence_ > 1; }
  bool is_searching() const { return !searching_.empty(); }
  // Ends all commands that wait.
  void stop(const Status& why);

 private:
  struct Search {
    std::shared_ptr<ShardRoutes> routes;
    uint32_t shard;
  };

  static ShardRoutes::Route& route_of(const RequestPiece& piece) {
    return piece.request->routes->shards[piece.command.shard.index];
  }
  void send(ShardRoutes* routes, ShardRoutes::Route* route, RequestPiece* piece);
  void move(const std::shared_ptr<ShardRoutes>& routes, uint32_t shard);
  void fail(ShardRoutes::Route* route, const Status& why);

  const Call call_;
  const End end_;
  uint64_t next_sequence_ = 1;
  std::vector<Search> searching_;
};

}  // namespace hvl
