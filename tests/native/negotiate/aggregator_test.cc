// The behaviour of one aggregator for each kind of message and record. Whole jobs are in aggregator_race_test.cc.
#include "negotiate/aggregator.h"

#include "check.h"
#include "coordinator_driver.h"
#include "negotiate/rank_set.h"

using namespace hvl;

namespace {

constexpr uint64_t kPatience = 100 * kMillisecond;

Signature change_of(Kind kind, const std::vector<int64_t>& arguments) {
  Signature signature = barrier_of(kind == HVL_ADD_PROCESS_SET ? "add" : "remove");
  signature.kind = kind;
  signature.arguments = arguments;
  return signature;
}

// Of a host with ranks 2 and 3; the host below it has ranks 4 and 5.
class AggregatorDriver {
 public:
  AggregatorDriver() : aggregator({RankSet({2, 3, 4, 5}), kPatience}) {}

  // The error, or "".
  std::string ready(const std::vector<int>& ranks, std::vector<TensorId> ids, uint64_t age = 0, uint64_t spread = 0) {
    Message message;
    message.ids = std::move(ids);
    return accept(std::move(message), ranks, age, spread);
  }
  std::string request(const std::vector<int>& ranks, const Signature& signature, std::vector<int64_t> varying = {}) {
    Message message;
    message.type = Message::Type::kRequest;
    message.signature = signature;
    message.varying = std::move(varying);
    if (!message.varying.empty()) take_varying(&message.signature);
    return accept(std::move(message), ranks, 0, 0);
  }
  std::string shut_down(int rank) {
    Message message;
    message.type = Message::Type::kShutdown;
    return accept(std::move(message), {rank}, 0, 0);
  }

  // "ready 1 2 of ranks 2, 3; request a of rank 4"
  std::string take() {
    last.clear();
    aggregator.take(now, &last);
    std::string text;
    for (const Message& message : last) {
      text += text.empty() ? "" : "; ";
      if (message.type == Message::Type::kReady) text += "ready";
      if (message.type == Message::Type::kRequest) text += "request " + message.signature.name;
      if (message.type == Message::Type::kShutdown) text += "shutdown";
      for (TensorId id : message.ids) text += " " + std::to_string(id);
      text += " of " + text_of_ranks(message.ranks.list());
    }
    return text;
  }

  void define(TensorId id, const Signature& signature, TensorId replaces = 0, std::vector<int32_t> absent = {}) {
    Record record;
    record.type = Record::Type::kDefine;
    record.id = id;
    record.signature = signature;
    record.replaces = replaces;
    record.absent = std::move(absent);
    aggregator.observe(record);
  }
  void execute(std::vector<TensorId> ids, std::vector<int32_t> absent = {}) {
    Record record;
    record.ids = std::move(ids);
    record.absent = std::move(absent);
    aggregator.observe(record);
  }
  void evict(std::vector<TensorId> ids) {
    Record record;
    record.type = Record::Type::kEvict;
    record.ids = std::move(ids);
    aggregator.observe(record);
  }
  void fail(const std::string& name, int32_t process_set = 0, std::vector<int32_t> absent = {}) {
    Record record;
    record.type = Record::Type::kError;
    record.signature.name = name;
    record.signature.process_set = process_set;
    record.absent = std::move(absent);
    aggregator.observe(record);
  }
  void add_process_set(const std::vector<int64_t>& ranks) {
    define(90, change_of(HVL_ADD_PROCESS_SET, ranks));
    execute({90});
  }

  Aggregator aggregator;
  uint64_t now = kSecond;
  std::vector<Message> last;

 private:
  std::string accept(Message message, const std::vector<int>& ranks, uint64_t age, uint64_t spread) {
    message.ranks = RankSet(ranks);
    message.latest = ranks.back();
    message.age = age;
    message.spread = spread;
    return aggregator.accept(message, now).message();
  }
};

}  // namespace

TEST(one_message_when_all_below_are_ready) {
  AggregatorDriver driver;
  driver.define(1, allreduce_of("a"));
  driver.define(2, allreduce_of("b"));
  driver.define(3, allreduce_of("c"));
  for (int round = 0; round < 3; ++round) {
    driver.ready({2}, {1, 2, 3});
    driver.ready({4, 5}, {3, 1, 2});
    CHECK_EQ(driver.take(), "");
    driver.ready({3}, {2, 1});
    CHECK_EQ(driver.take(), "ready 2 1 of ranks 2, 3, 4, 5");
    driver.ready({3}, {3});
    CHECK_EQ(driver.take(), "ready 3 of ranks 2, 3, 4, 5");
    CHECK_EQ(driver.aggregator.next_deadline(), UINT64_MAX);
    driver.execute({2, 1, 3});
  }
}

TEST(times_go_on_as_ages) {
  AggregatorDriver driver;
  driver.define(1, allreduce_of("a"));
  driver.define(2, allreduce_of("b"));
  driver.ready({3}, {1, 2}, 2000);          // at -2000
  driver.ready({4, 5}, {1, 2}, 1000, 500);  // at -1500 and -1000
  driver.now += 10000;
  driver.ready({2}, {2}, 20000);  // at -10000
  driver.ready({2}, {1}, 4000);   // at 6000
  driver.now += 3000;
  CHECK_EQ(driver.take(), "ready 2 of ranks 2, 3, 4, 5; ready 1 of ranks 2, 3, 4, 5");
  CHECK_EQ(driver.last[0].latest, 5);
  CHECK_EQ(driver.last[0].age, 14000);
  CHECK_EQ(driver.last[0].spread, 9000);
  CHECK_EQ(driver.last[1].latest, 2);
  CHECK_EQ(driver.last[1].age, 7000);
  CHECK_EQ(driver.last[1].spread, 8000);
}

TEST(a_part_goes_on_after_a_while_and_the_rest_when_it_is_there) {
  AggregatorDriver driver;
  driver.define(1, allreduce_of("a"));
  driver.ready({2}, {1}, kMillisecond);
  driver.request({3}, allreduce_of("b"));
  CHECK_EQ(driver.aggregator.next_deadline(), driver.now + kPatience - kMillisecond);
  driver.now += kPatience - kMillisecond - 1;
  CHECK_EQ(driver.take(), "");
  driver.now += 1;
  CHECK_EQ(driver.take(), "ready 1 of rank 2");
  CHECK_EQ(driver.aggregator.next_deadline(), driver.now + kMillisecond);
  driver.now += kMillisecond;
  CHECK_EQ(driver.take(), "request b of rank 3");
  CHECK_EQ(driver.aggregator.next_deadline(), UINT64_MAX);
  driver.ready({3, 5}, {1});
  driver.request({2, 4, 5}, allreduce_of("b"));
  CHECK_EQ(driver.aggregator.next_deadline(), 0);
  CHECK_EQ(driver.take(), "request b of ranks 2, 4, 5");
  driver.ready({4}, {1});
  CHECK_EQ(driver.take(), "ready 1 of ranks 3, 4, 5");
  driver.execute({1});
  driver.ready({2, 3}, {1});  // all are needed again
  CHECK_EQ(driver.take(), "");
  driver.ready({4, 5}, {1});
  CHECK_EQ(driver.take(), "ready 1 of ranks 2, 3, 4, 5");
}

TEST(what_a_child_passes_on_late_is_not_held_again) {
  AggregatorDriver driver;
  driver.define(1, allreduce_of("a"));
  driver.ready({3}, {1});
  driver.ready({4}, {1}, 0, 2 * kPatience);
  CHECK_EQ(driver.take(), "ready 1 of ranks 3, 4");
  driver.ready({2}, {1}, UINT64_MAX);  // older than the clock
  CHECK_EQ(driver.take(), "ready 1 of rank 2");
}

TEST(equal_requests_are_one_and_others_are_not) {
  AggregatorDriver driver;
  driver.request({2}, allreduce_of("a"));
  driver.request({4, 5}, allreduce_of("a"));
  driver.request({3}, allreduce_of("a"));
  CHECK_EQ(driver.take(), "request a of ranks 2, 3, 4, 5");
  CHECK(driver.last[0].signature == allreduce_of("a"));
  driver.fail("a");
  driver.request({2, 5}, allreduce_of("a", {7}));
  driver.request({3, 4}, allreduce_of("a"));
  CHECK_EQ(driver.take(), "request a of ranks 2, 5; request a of ranks 3, 4");
  CHECK(driver.last[0].signature == allreduce_of("a", {7}));
  driver.define(1, allreduce_of("a"));
  driver.execute({1});
  driver.ready({4, 5}, {1});
  driver.request({2}, allreduce_of("a", {7}));
  driver.ready({3}, {1});
  CHECK_EQ(driver.take(), "ready 1 of ranks 3, 4, 5; request a of rank 2");
}

TEST(what_varies_is_told_of_every_rank) {
  AggregatorDriver driver;
  driver.request({4, 5}, allgather_of("g", {0, 7}), {6, 9});
  driver.request({3}, allgather_of("g", {8, 7}));
  driver.request({2}, allgather_of("g", {1, 7}));
  CHECK_EQ(driver.take(), "request g of ranks 2, 3, 4, 5");
  CHECK(driver.last[0].varying == std::vector<int64_t>({1, 8, 6, 9}));
  CHECK(driver.last[0].signature == allgather_of("g", {0, 7}));
  driver.fail("g");
  driver.request({2, 3, 5}, allgather_of("g", {4, 7}));
  driver.request({4}, allgather_of("g", {4, 7}));
  CHECK_EQ(driver.take(), "request g of ranks 2, 3, 4, 5");
  CHECK(driver.last[0].varying.empty());
  CHECK(driver.last[0].signature == allgather_of("g", {4, 7}));
  driver.fail("g");
  for (int rank : {2, 3, 4, 5}) driver.request({rank}, allgather_of("g", {rank, rank == 3 ? 6 : 7}));
  CHECK_EQ(driver.take(), "request g of ranks 2, 4, 5; request g of rank 3");
}

TEST(splits_of_another_number_of_ranks_are_a_message_of_their_own) {
  AggregatorDriver driver;
  Signature alltoall = allgather_of("x", {3});
  alltoall.kind = HVL_ALLTOALL;
  for (int rank : {2, 3, 4, 5}) {
    alltoall.arguments = rank == 4 ? std::vector<int64_t>{3} : std::vector<int64_t>{1, 2};
    driver.request({rank}, alltoall);
  }
  CHECK_EQ(driver.take(), "request x of ranks 2, 3, 5; request x of rank 4");
}

TEST(scalars_that_cannot_be_gathered) {
  AggregatorDriver driver;
  for (int rank : {2, 3, 4, 5}) driver.request({rank}, allgather_of("g", {}));
  CHECK_EQ(driver.take(), "request g of ranks 2, 3, 4, 5");
  CHECK(driver.last[0].signature == allgather_of("g", {}));
}

TEST(only_members_are_waited_for) {
  AggregatorDriver driver;
  driver.add_process_set({0, 3, 4, 6});
  driver.define(2, of_set(1, allreduce_of("x")));
  driver.ready({4}, {2});
  CHECK_EQ(driver.take(), "");
  driver.ready({3}, {2});
  CHECK_EQ(driver.take(), "ready 2 of ranks 3, 4");
  driver.request({3}, of_set(1, allreduce_of("y")));
  driver.request({3}, allreduce_of("y"));  // another tensor
  CHECK_EQ(driver.take(), "");
  driver.request({4}, of_set(1, allreduce_of("y")));
  CHECK_EQ(driver.take(), "request y of ranks 3, 4");
  CHECK_EQ(driver.last[0].signature.process_set, 1);
}

TEST(what_the_coordinator_has_to_judge_goes_on) {
  AggregatorDriver driver;
  driver.add_process_set({0, 3});
  driver.define(2, of_set(1, allreduce_of("x")));
  CHECK_EQ(driver.ready({4}, {2, 7}), "");  // no member; no tensor
  CHECK_EQ(driver.request({5}, of_set(1, allreduce_of("x"))), "");
  CHECK_EQ(driver.request({5}, of_set(3, allreduce_of("x"))), "");
  CHECK_EQ(driver.take(), "ready 2 7 of rank 4; request x of rank 5; request x of rank 5");
}

TEST(what_is_ready_before_a_join_goes_on_before_it) {
  AggregatorDriver driver;
  driver.add_process_set({2, 3, 4});
  driver.define(1, allreduce_of("a"));
  driver.define(2, allreduce_of("b"));
  driver.define(3, of_set(1, allreduce_of("x")));
  driver.ready({4}, {1, 3});
  driver.ready({2}, {2});
  driver.request({4}, join_of());
  CHECK_EQ(driver.take(), "ready 1 of rank 4; ready 2 of rank 2; request join of rank 4");
  driver.ready({2, 3}, {3});  // of the other set nothing goes on before
  CHECK_EQ(driver.take(), "ready 3 of ranks 2, 3, 4");
}

TEST(who_has_joined_is_not_waited_for) {
  AggregatorDriver driver;
  driver.define(1, allreduce_of("a"));
  driver.define(2, join_of());
  driver.ready({3}, {1});
  driver.ready({4}, {2});
  CHECK_EQ(driver.take(), "ready 1 of rank 3; ready 2 of rank 4");
  driver.ready({2}, {1});
  CHECK_EQ(driver.take(), "");
  driver.request({5}, allreduce_of("a"));
  CHECK_EQ(driver.take(), "ready 1 of rank 2; request a of rank 5");
  driver.execute({1}, {4});
  driver.ready({4}, {1});  // another thread of it
  driver.ready({2, 3}, {1});
  CHECK_EQ(driver.take(), "");
  driver.ready({5}, {1});
  CHECK_EQ(driver.take(), "ready 1 of ranks 2, 3, 4, 5");
  driver.execute({1});
  driver.ready({2, 3, 5}, {1});
  CHECK_EQ(driver.take(), "ready 1 of ranks 2, 3, 5");
  driver.ready({4}, {1});
  driver.execute({1}, {4});  // its own is for the next time
  for (int rank : {2, 3, 5}) driver.ready({rank}, {2});
  CHECK_EQ(driver.take(), "ready 1 of rank 4; ready 2 of rank 2; ready 2 of rank 3; ready 2 of rank 5");
  driver.execute({2});
  driver.ready({2, 3}, {1});
  CHECK_EQ(driver.take(), "");
  driver.ready({5}, {1});
  CHECK_EQ(driver.take(), "ready 1 of ranks 2, 3, 5");
  driver.execute({1});
  driver.ready({2, 3, 5}, {1});  // rank 4 is needed again
  CHECK_EQ(driver.take(), "");
}

TEST(a_join_that_came_too_late_for_what_failed_under_its_name) {
  AggregatorDriver driver;
  driver.define(1, allreduce_of("a"));
  driver.request({2}, join_of());
  driver.request({4}, join_of());
  CHECK_EQ(driver.take(), "request join of rank 2; request join of rank 4");
  driver.request({4}, allreduce_of("b"));
  driver.fail("b", 0, {4});  // of the others
  driver.fail("join", 0, {4});
  driver.ready({3, 5}, {1});
  CHECK_EQ(driver.take(), "");
  driver.ready({2}, {1});
  CHECK_EQ(driver.take(), "ready 1 of ranks 2, 3, 5");  // rank 4 has joined
  driver.execute({1}, {4});
  driver.fail("join");
  driver.ready({2, 3, 5}, {1});
  driver.request({2, 3, 5}, allreduce_of("b"));
  CHECK_EQ(driver.take(), "request b of ranks 2, 3, 4, 5");
}

TEST(what_is_announced_by_an_id_that_is_evicted_is_announced_again) {
  AggregatorDriver driver;
  driver.define(1, allreduce_of("a"));
  driver.ready({2, 3}, {1});
  driver.request({4}, allreduce_of("a", {9}));
  driver.evict({1});
  CHECK_EQ(driver.take(), "");
  driver.ready({5}, {1});  // it has not read that: the coordinator does not heed it
  CHECK_EQ(driver.take(), "ready 1 of rank 5");
  driver.request({2, 3}, allreduce_of("a"));
  CHECK_EQ(driver.take(), "");
  driver.request({5}, allreduce_of("a"));
  CHECK_EQ(driver.take(), "request a of rank 4; request a of ranks 2, 3, 5");
}

TEST(what_has_gone_on_when_the_id_is_evicted) {
  AggregatorDriver driver;
  driver.define(1, allreduce_of("a"));
  driver.ready({2, 3}, {1});
  driver.request({4, 5}, allreduce_of("a"));
  CHECK_EQ(driver.take(), "ready 1 of ranks 2, 3; request a of ranks 4, 5");
  driver.evict({1});
  driver.request({2}, allreduce_of("a"));
  CHECK_EQ(driver.take(), "");
  driver.request({3}, allreduce_of("a"));  // ranks 4 and 5 do not say it again
  CHECK_EQ(driver.take(), "request a of ranks 2, 3");
}

TEST(an_id_that_is_replaced) {
  AggregatorDriver driver;
  driver.define(1, allreduce_of("a"));
  driver.request({2}, join_of());
  driver.ready({3, 4, 5}, {1});
  CHECK_EQ(driver.take(), "request join of rank 2; ready 1 of ranks 3, 4, 5");
  driver.define(5, allreduce_of("a", {8}), 1, {2});
  driver.execute({5}, {2});
  driver.ready({2}, {1});  // of another thread, which has not read that
  CHECK_EQ(driver.take(), "ready 1 of rank 2");
  driver.request({2}, allreduce_of("a"));  // again
  driver.define(6, allreduce_of("a", {9}), 5, {2});
  driver.ready({3, 4}, {6});
  CHECK_EQ(driver.take(), "");
  driver.ready({5}, {6});
  CHECK_EQ(driver.take(), "ready 6 of ranks 3, 4, 5; request a of rank 2");
  driver.execute({6});
  driver.ready({2}, {6});
  driver.define(7, allreduce_of("a"), 6, {2});
  driver.ready({3, 4, 5}, {7});
  CHECK_EQ(driver.take(), "ready 7 of ranks 3, 4, 5");
}

TEST(what_a_rank_has_ready_on_a_set_goes_on_before_a_change) {
  AggregatorDriver driver;
  driver.add_process_set({2, 3, 4});
  driver.define(2, of_set(1, allreduce_of("x")));
  driver.ready({2}, {2});
  driver.request({2}, change_of(HVL_REMOVE_PROCESS_SET, {1}));
  driver.ready({3}, {2});
  driver.request({3}, change_of(HVL_REMOVE_PROCESS_SET, {1}));
  CHECK_EQ(driver.take(), "ready 2 of rank 2; ready 2 of rank 3");
  driver.request({4}, of_set(1, allreduce_of("y")));
  driver.request({4, 5}, change_of(HVL_REMOVE_PROCESS_SET, {1}));
  CHECK_EQ(driver.take(), "request y of rank 4; request remove of ranks 2, 3, 4, 5");
}

TEST(a_set_that_is_removed) {
  AggregatorDriver driver;
  driver.add_process_set({2, 3, 4});
  driver.define(1, change_of(HVL_REMOVE_PROCESS_SET, {1}));
  driver.define(2, of_set(1, allreduce_of("x")));
  driver.define(3, of_set(1, allreduce_of("y")));
  driver.request({2}, join_of(1));
  CHECK_EQ(driver.take(), "request join of rank 2");
  driver.fail("join", 1);
  driver.ready({3, 4}, {2, 3});
  driver.request({2}, of_set(1, allreduce_of("z")));
  driver.request({3}, of_set(1, allreduce_of("w")));
  for (const char* name : {"w", "x"}) driver.fail(name, 1);  // others have them ready
  driver.evict({2, 3});
  CHECK_EQ(driver.take(), "");  // ranks 3 and 4 know: w and x have failed, and y is to be said again
  driver.request({3}, of_set(1, allreduce_of("x")));
  driver.execute({1});
  driver.request({4}, of_set(1, allreduce_of("y")));
  CHECK_EQ(driver.take(), "request z of rank 2; request x of rank 3; request y of rank 4");
  driver.add_process_set({3, 5});  // the same id again
  driver.request({3}, of_set(1, allreduce_of("x")));
  CHECK_EQ(driver.take(), "");
  driver.request({5}, of_set(1, allreduce_of("x")));
  CHECK_EQ(driver.take(), "request x of ranks 3, 5");
}

TEST(a_rank_that_has_its_answer_before_its_request_comes) {
  AggregatorDriver driver;
  driver.fail("a");
  driver.request({2}, allreduce_of("a"));
  driver.request({2}, allreduce_of("a", {8}));  // for the next time
  CHECK_EQ(driver.take(), "request a of rank 2");
  CHECK(driver.last[0].signature == allreduce_of("a"));
  driver.request({3, 4}, allreduce_of("a", {8}));
  CHECK_EQ(driver.take(), "");
  driver.request({5}, allreduce_of("a", {8}));
  CHECK_EQ(driver.take(), "request a of ranks 2, 3, 4, 5");
}

TEST(a_rank_that_leaves) {
  AggregatorDriver driver;
  driver.define(1, allreduce_of("a"));
  driver.ready({2}, {1});
  CHECK_EQ(driver.shut_down(3), "");
  CHECK_EQ(driver.take(), "ready 1 of rank 2; shutdown of rank 3");
  CHECK_EQ(driver.shut_down(4), "");
  CHECK_EQ(driver.ready({3, 4, 5}, {1}), "");
  CHECK_EQ(driver.take(), "");  // the coordinator heeds nothing any more
}

TEST(the_end_of_the_log) {
  AggregatorDriver driver;
  driver.define(1, allreduce_of("a"));
  driver.define(2, allreduce_of("b"));
  driver.ready({2}, {1});
  driver.ready({2, 3, 4, 5}, {2});
  Record record;
  record.type = Record::Type::kShutdown;
  driver.aggregator.observe(record);
  CHECK_EQ(driver.aggregator.next_deadline(), UINT64_MAX);
  CHECK_EQ(driver.take(), "");
  CHECK_EQ(driver.ready({3}, {1}), "");
  CHECK_EQ(driver.aggregator.next_deadline(), UINT64_MAX);
}

TEST(messages_that_no_correct_host_sends) {
  AggregatorDriver driver;
  Message message;
  CHECK_EQ(driver.aggregator.accept(message, 0).message(), "Protocol error: rank -1 speaks for no rank.");
  message.speak_for(3, 0);
  message.latest = 4;
  CHECK_EQ(driver.aggregator.accept(message, 0).code(), HVL_JOB_BROKEN);
  CHECK_EQ(driver.ready({5, 6}, {1}), "Protocol error: rank 6 sent a message for ranks that are not below this host.");
  message.latest = 3;
  message.type = static_cast<Message::Type>(9);
  CHECK_EQ(driver.aggregator.accept(message, 0).message(), "Protocol error: rank 3 sent a message of unknown type.");
}
