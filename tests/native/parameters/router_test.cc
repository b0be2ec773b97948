// The way of a client's commands between the servers of a ring, which this test answers.
#include "parameters/router.h"

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "check.h"

namespace hvl {
namespace {

// A client of an array with one shard, at the first of three servers.
struct Routed {
  struct Sent {
    int64_t server;
    RequestPiece* piece;
  };
  std::shared_ptr<ShardRoutes> routes = std::make_shared<ShardRoutes>();
  std::vector<std::unique_ptr<ClientRequest>> requests;
  std::deque<Sent> sent;  // and not answered
  std::vector<std::pair<uint64_t, Status>> ended;
  Router router{
      [this](int64_t server, RequestPiece* piece) {
        sent.push_back(Sent{server, piece});
        return true;
      },
      [this](RequestPiece* piece, const Status& status) { ended.emplace_back(piece->command.sequence, status); }};

  Routed() {
    routes->servers = {10, 11, 12};
    routes->shards.resize(1);
  }
  void push() {
    auto request = std::make_unique<ClientRequest>();
    request->routes = routes;
    RequestPiece& piece = request->pieces.emplace_back();
    piece.request = request.get();
    requests.push_back(std::move(request));
    router.begin(&piece);
  }
  void answer(const Status& status, uint32_t view) {
    REQUIRE(!sent.empty());
    RequestPiece* piece = sent.front().piece;
    sent.pop_front();
    piece->is_answered = true;
    piece->view = view;
    router.on_end(piece, status);
  }
};

const Status kRefused = Status::lost("refused"), kNoShard = Status::lost("no shard");

TEST(the_first_command_at_another_server_resumes) {
  Routed client;
  for (int push = 0; push < 3; ++push) client.push();
  for (const Routed::Sent& each : client.sent) CHECK(each.server == 10 && !each.piece->command.resumes);
  client.answer(kRefused, 0);
  for (int push = 0; push < 2; ++push) client.answer(Status::lost("a command before this one was refused"), 0);
  CHECK_EQ(client.routes->shards[0].why.message(), kRefused.message());
  client.push();
  CHECK_EQ(client.sent.size(), size_t{4});
  for (uint64_t index = 0; index < 4; ++index) {
    const Command& command = client.sent[index].piece->command;
    CHECK_EQ(client.sent[index].server, int64_t{11});
    CHECK_EQ(command.sequence, index + 1);
    CHECK_EQ(command.resumes, index == 0);
  }
  for (int push = 0; push < 4; ++push) client.answer(Status(), 2);
  client.push();
  CHECK_EQ(client.sent[0].server, int64_t{11});
  CHECK(!client.sent[0].piece->command.resumes);
}

TEST(a_client_insists_when_it_has_not_found_the_primary_for_long) {
  Routed client;
  client.routes->patience = 2 * kSecond;
  client.push();
  const uint64_t begin = now_ns();
  while (client.sent.empty() || !client.sent.front().piece->command.insists) {
    if (client.sent.empty()) client.router.retry();
    const bool has_copy = client.sent.front().server == 11;
    client.answer(has_copy ? kRefused : kNoShard, has_copy ? 1 : 0);
    REQUIRE(now_ns() - begin < 10 * kSecond);
  }
  CHECK(now_ns() - begin >= 2 * kSecond);
  CHECK_EQ(client.ended.size(), size_t{0});
  client.answer(Status(), 2);
  CHECK_EQ(client.ended.size(), size_t{1});
  CHECK(client.ended[0].second.ok());
}

TEST(a_shard_that_no_server_has_is_lost) {
  Routed client;
  client.push();
  const uint64_t begin = now_ns();
  while (client.ended.empty()) {
    client.sent.empty() ? client.router.retry() : client.answer(kNoShard, 0);
  }
  CHECK(now_ns() - begin < 10 * kSecond);
  CHECK_HAS(client.ended[0].second.message(), "shard 0 is lost with both of its servers: no shard");
  client.push();
  CHECK(client.sent.front().piece->command.resumes);
}

}  // namespace
}  // namespace hvl
