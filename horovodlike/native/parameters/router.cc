#include "parameters/router.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"

namespace hvl {

namespace {

constexpr uint64_t kSearch = 1500 * kMillisecond;  // a shard may be between two servers for a moment

}  // namespace

void Router::begin(RequestPiece* piece) {
  ShardRoutes::Route& route = route_of(*piece);
  piece->command.sequence = next_sequence_++;
  piece->patience = piece->request->routes->patience;
  if (route.is_moving) return route.held.push_back(piece);
  send(piece->request->routes.get(), &route, piece);
}

void Router::send(ShardRoutes* routes, ShardRoutes::Route* route, RequestPiece* piece) {
  piece->command.view = route->view;
  piece->command.insists = route->search_began != 0 && now_ns() - route->search_began >= routes->patience;
  piece->command.resumes = std::exchange(route->resumes, false);
  piece->is_answered = piece->is_sent = piece->is_coming = false;
  ++route->num_under_way;
  if (!call_(routes->servers[route->at], piece)) {
    on_end(piece, Status::lost("the connection to its server has ended"));
  }
}

// The commands stay in their order: none is sent to the next server before all have ended at this one.
void Router::on_end(RequestPiece* piece, const Status& status) {
  const std::shared_ptr<ShardRoutes> routes = piece->request->routes;
  const uint32_t shard = piece->command.shard.index;
  ShardRoutes::Route& route = routes->shards[shard];
  --route.num_under_way;
  const bool is_elsewhere = piece->is_answered ? status.is_lost() : !status.ok() && status.code() != HVL_SHUT_DOWN;
  if (is_elsewhere) {
    if (!route.is_moving) route.why = status;  // those behind it are refused because of this
    route.is_moving = true;
    const bool is_there = piece->is_answered && piece->view >= route.view;  // the server has a copy of the shard
    if (is_there) route.deadline = now_ns() + kSearch;
    route.held.push_back(piece);
  } else {
    if (piece->is_answered) {
      route.view = std::max(route.view, piece->view);
      route.search_began = 0;
    }
    end_(piece, status);
  }
  if (route.is_moving && route.num_under_way == 0) move(routes, shard);
}

void Router::move(const std::shared_ptr<ShardRoutes>& routes, uint32_t shard) {
  ShardRoutes::Route& route = routes->shards[shard];
  const uint64_t now = now_ns();
  if (route.search_began == 0) {
    route.search_began = now;
    route.deadline = now + kSearch;
    route.num_tried = route.num_rounds = 0;
  }
  if (++route.num_tried >= routes->servers.size()) {
    // A server that did not answer may have taken all of the time.
    if (now < route.deadline || route.num_rounds < 2)
      return searching_.push_back(Search{routes, shard});  // after a pause
    return fail(&route, Status::lost("shard " + std::to_string(shard) +
                                     " is lost with both of its servers: " + route.why.message()));
  }
  route.at = (route.at + 1) % routes->servers.size();
  route.is_moving = false;
  route.resumes = true;
  std::vector<RequestPiece*> held = std::exchange(route.held, {});
  std::sort(held.begin(), held.end(), [](const RequestPiece* one, const RequestPiece* other) {
    return one->command.sequence < other->command.sequence;
  });
  route.num_under_way += 1;  // so that the first one that fails does not move the route amid them
  for (RequestPiece* piece : held) {
    route.is_moving ? route.held.push_back(piece) : send(routes.get(), &route, piece);
  }
  route.num_under_way -= 1;
  if (route.is_moving && route.num_under_way == 0) move(routes, shard);
}

void Router::retry() {
  for (const Search& search : std::exchange(searching_, {})) {
    ShardRoutes::Route& route = search.routes->shards[search.shard];
    route.num_tried = 0;
    ++route.num_rounds;
    move(search.routes, search.shard);
  }
}

void Router::fail(ShardRoutes::Route* route, const Status& why) {
  route->search_began = 0;
  route->is_moving = false;
  route->resumes = true;
  for (RequestPiece* piece : std::exchange(route->held, {})) end_(piece, why);
}

void Router::stop(const Status& why) {
  for (const Search& search : std::exchange(searching_, {})) fail(&search.routes->shards[search.shard], why);
}

}  // namespace hvl
