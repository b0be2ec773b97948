// A primary, whose replica is this test.
#include "parameters/replicator.h"

#include <deque>
#include <string>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "parameters/shard_store.h"

namespace hvl {
namespace {

const ShardId kCopied{7, 0};
const Status kDeposed = Status::lost("another server is the primary"), kBroken = Status::lost("the connection is lost");

struct PrimaryStore : ShardStore {
  struct Waiting : CommandOwner {
    std::vector<Reply> replies;

    void on_settled(const Reply& reply) override { replies.push_back(reply); }
    void on_room() override {}
  };
  static constexpr int64_t kReplica = 9;
  std::deque<Piece*> sent;  // to the replica, and not answered
  Waiting waiting;
  bool has_ended = false;

  PrimaryStore() {
    replicator().set_call([this](int64_t, Piece* piece) {
      sent.push_back(piece);
      return true;
    });
    CHECK(create(kCopied, HVL_FLOAT64, 4, 0, 0, RingInfo{1, kLeastPatience}).ok());
    replicator().begin(1, kReplica, [this](const Status&) { has_ended = true; });
    while (!sent.empty()) answer();
    CHECK(shard()->copy == CopyState::kComplete);
  }
  StoredShard* shard() { return find(kCopied); }
  // Carries out a change, for which the owner waits.
  void change(uint64_t number) {
    Command command;
    command.shard = kCopied;
    CHECK(replicator().forward(shard(), command, nullptr, 0, {}, &waiting, Reply{number, Status()}));
  }
  void end_first(const Status& status, bool is_answered) {
    REQUIRE(!sent.empty());
    Piece* piece = sent.front();
    sent.pop_front();
    piece->is_answered = is_answered;
    const auto on_end = std::move(piece->on_end);
    on_end(piece, status);
  }
  void answer(const Status& status = Status()) { end_first(status, true); }
  void lose_replica() {
    while (!sent.empty()) end_first(kBroken, false);
    replicator().end_server(kReplica, kBroken);
  }
};

TEST(a_deposed_primary_acknowledges_nothing) {
  PrimaryStore store;
  for (uint64_t number = 1; number <= 2; ++number) store.change(number);
  CHECK(store.replicator().settle(store.shard(), &store.waiting, Reply{3, Status()}));
  store.answer(kDeposed);
  CHECK(store.shard() == nullptr);
  store.lose_replica();
  CHECK_EQ(store.waiting.replies.size(), size_t{3});
  for (const Reply& reply : store.waiting.replies) CHECK_EQ(reply.status.message(), kDeposed.message());
}

TEST(a_primary_without_its_replica_continues) {
  PrimaryStore store;
  store.change(1);
  store.lose_replica();
  CHECK(store.has_ended);
  CHECK(store.shard()->copy == CopyState::kNone);
  CHECK(store.waiting.replies.at(0).status.ok());
}

TEST(a_primary_that_was_paused_and_loses_its_replica_releases_its_shards) {
  PrimaryStore store, sure, whole_job;
  for (PrimaryStore* each : {&store, &sure, &whole_job}) {
    each->change(1);
    const uint64_t now = now_ns();
    each->check_pause(now - kLeastPatience);
    each->check_pause(now);
    CHECK_EQ(each->sent.size(), size_t{2});
    each->answer();  // to the change, perhaps from before the pause
    CHECK(each->waiting.replies.at(0).status.ok());
  }
  store.change(2);
  store.lose_replica();
  CHECK(store.shard() == nullptr);
  CHECK(store.waiting.replies.at(1).status.is_lost());

  sure.change(2);
  sure.answer();
  sure.lose_replica();
  CHECK(sure.shard()->copy == CopyState::kNone);
  CHECK(sure.waiting.replies.at(1).status.ok());

  whole_job.answer(Status(HVL_INVALID_ARGUMENT, "there is no copy"));  // the replica was paused, too
  CHECK(whole_job.has_ended);
  CHECK(whole_job.shard()->copy == CopyState::kNone);
}

TEST(a_copy_is_not_replaced_by_an_older_one) {
  ShardStore store;
  PrimaryStore::Waiting newer, older;
  Command command;
  command.shard = kCopied;
  command.dtype = HVL_FLOAT64;
  command.range.count = 4;
  const auto ring = [](uint64_t view) { return RingInfo{1, kMostPatience, view}; };
  CHECK(store.begin_copy(command, ring(3), &newer).ok());
  for (uint64_t view = 2; view <= 3; ++view) CHECK(store.begin_copy(command, ring(view), &older).is_lost());
  StoredShard* shard = nullptr;
  command.view = 2;
  CHECK(store.find_copy(command, &older, &shard).is_lost());
  command.view = 3;
  CHECK(store.find_copy(command, &newer, &shard).ok());
  CHECK(store.begin_copy(command, ring(4), &older).ok());
  CHECK(store.find_copy(command, &newer, &shard).is_lost());
}

}  // namespace
}  // namespace hvl
