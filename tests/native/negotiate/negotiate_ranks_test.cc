// Messages that speak for several ranks, as the coordinator hears them: the same as if each rank had sent its own.
#include <map>
#include <random>

#include "check.h"
#include "coordinator_driver.h"

using namespace hvl;

namespace {

Message ready_of(const std::vector<int>& ranks, std::vector<TensorId> ids) {
  Message message;
  message.ids = std::move(ids);
  message.ranks = RankSet(ranks);
  message.latest = ranks.back();
  return message;
}

Message request_of(const std::vector<int>& ranks, const Signature& signature, std::vector<int64_t> varying = {}) {
  Message message = ready_of(ranks, {});
  message.type = Message::Type::kRequest;
  message.signature = signature;
  message.varying = std::move(varying);
  if (!message.varying.empty()) take_varying(&message.signature);
  return message;
}

std::vector<int> up_to(int last, int first = 0) {
  std::vector<int> ranks;
  for (int rank = first; rank <= last; ++rank) ranks.push_back(rank);
  return ranks;
}

std::string hear(CoordinatorDriver* driver, const Message& message, uint64_t came = 0) {
  return driver->coordinator.on_message(message, came).message();
}

}  // namespace

TEST(ranks_at_once_and_one_by_one) {
  for (int size : {2, 3, 64, 65, 128, 200}) {
    CoordinatorDriver driver(size);
    CHECK_EQ(hear(&driver, request_of(up_to(size - 1, 1), allreduce_of("a"))), "");
    CHECK_EQ(driver.decide(), "");
    CHECK_EQ(driver.request(0, allreduce_of("a")), "");
    CHECK_EQ(driver.decide(), "define 1 a; execute 1");
    CHECK_EQ(driver.coordinator.negotiated_in_full(), size);
    for (int first = 1; first < size; ++first) {
      CHECK_EQ(hear(&driver, ready_of(up_to(size - 1, first), {1})), "");
      CHECK_EQ(driver.decide(), "");
      CHECK_EQ(hear(&driver, ready_of(up_to(first - 1), {1})), "");
      CHECK_EQ(driver.decide(), "execute 1");
    }
  }
}

TEST(rows_of_many_ranks_in_one_request) {
  CoordinatorDriver driver(4);
  hear(&driver, request_of({0, 2}, allgather_of("g", {0, 3}), {5, 7}));
  hear(&driver, request_of({1, 3}, allgather_of("g", {4, 3})));
  CHECK_EQ(driver.decide(), "define 1 g; execute 1");
  CHECK(driver.last[0].record.varying == std::vector<int64_t>({5, 4, 7, 4}));
  CHECK(driver.last[0].record.signature.tensors[0].shape == Shape({20, 3}));
}

TEST(how_they_differ_is_said_of_every_rank) {
  CoordinatorDriver driver(6);
  hear(&driver, request_of({0, 1, 5}, allreduce_of("a")));
  hear(&driver, request_of({2, 3, 4}, allreduce_of("a", {5})));
  CHECK_EQ(driver.decide(), "error a");
  CHECK_EQ(driver.last[0].record.text,
           "Mismatched shapes for allreduce 'a': ranks 0, 1, 5 have [4], ranks 2, 3, 4 have [5].");
}

TEST(times_are_what_they_were_on_the_way) {
  CoordinatorDriver driver(4);
  driver.request_all(allreduce_of("a"));
  driver.decide();
  Message message = ready_of({1, 2}, {1});
  message.latest = 1;
  message.age = 3 * kMillisecond;
  message.spread = 2 * kMillisecond;
  hear(&driver, message, 100 * kMillisecond);
  const std::vector<Pending> pending = driver.coordinator.pending();
  REQUIRE(pending.size() == 1);
  CHECK_EQ(pending[0].since, 95 * kMillisecond);
  CHECK(pending[0].missing == std::vector<int>({0, 3}));
  driver.ready(0, {1}, 96 * kMillisecond);
  driver.ready(3, {1}, 96 * kMillisecond);
  CHECK_EQ(driver.decide(), "execute 1");
  CHECK_EQ(driver.coordinator.straggler_stats()[1].times, 1);
  CHECK_EQ(driver.coordinator.straggler_stats()[1].waited, 2 * kMillisecond);
  message = ready_of({0, 1, 2, 3}, {1});
  message.age = message.spread = UINT64_MAX;  // older than the clock
  CHECK_EQ(hear(&driver, message, 1), "");
  CHECK_EQ(driver.decide(), "execute 1");
}

TEST(messages_that_no_correct_host_sends) {
  CoordinatorDriver driver(70);
  driver.request_all(add_of({1, 3}));
  driver.request_all(allreduce_of("a"));
  driver.decide();
  for (int rank : {1, 3}) {
    Signature signature = allreduce_of("x");
    signature.process_set = 1;
    driver.request(rank, signature);
  }
  CHECK_EQ(driver.decide(), "define 3 x; execute 3");
  CHECK_EQ(hear(&driver, Message()), "Protocol error: rank -1 speaks for no rank.");
  CHECK_EQ(hear(&driver, ready_of({69, 70}, {2})), "Protocol error: rank 70 does not exist.");
  CHECK_EQ(hear(&driver, ready_of(up_to(69), {9})), "Protocol error: rank 0 announced the unknown tensor id 9.");
  driver.ready(66, {2});
  CHECK_EQ(hear(&driver, ready_of(up_to(69), {2})),
           "Protocol error: rank 66 announced 'a' again before it was executed.");
  CHECK_EQ(hear(&driver, ready_of({1, 2, 3}, {3})),
           "Protocol error: rank 2 announced a tensor of a process set of which it is no member.");
  Signature signature = allreduce_of("y");
  signature.process_set = 1;
  CHECK_EQ(hear(&driver, request_of({3, 4}, signature)),
           "Protocol error: rank 4 sent 'y' for process set 1, of which it is no member.");
  Message shutdown = ready_of({5, 6}, {});
  shutdown.type = Message::Type::kShutdown;
  CHECK_EQ(hear(&driver, shutdown), "");
  CHECK_EQ(driver.decide(), "shutdown");
  CHECK_EQ(driver.last[0].record.text, "rank 6 has shut the job down");
}

TEST(the_latest_of_those_that_join_together) {
  CoordinatorDriver driver(3);
  driver.request(1, join_of(0, "join"));
  Message message = request_of({0, 2}, join_of(0, "join"));
  message.latest = 0;
  hear(&driver, message);
  CHECK_EQ(driver.decide(), "define 1 join; execute 1");
  CHECK_EQ(driver.last[1].record.last_joined, 0);
}

namespace {

// Two coordinators, of which one hears many ranks at once what the other hears from each. All ranks read the log at
// once, have several threads, and join now and then.
class TwoCoordinators {
 public:
  TwoCoordinators(int size, int capacity, unsigned seed)
      : size_(size), random_(seed), at_once_(options(capacity)), singly_(options(capacity)) {
    std::vector<int64_t> odd;
    for (int rank = 1; rank < size; rank += 2) odd.push_back(rank);
    for (CoordinatorDriver* driver : {&at_once_, &singly_}) {
      driver->request_all(add_of(odd));
      CHECK_EQ(driver->decide().substr(0, 23), "define 1 add; execute 1");
    }
  }

  void step() {
    now_ += 1000 * (random_() % 3000);
    if (random_() % 4 == 0) return decide();
    const Signature signature = any_request();
    const std::string key = std::to_string(signature.process_set) + signature.name;
    std::vector<int> ranks;
    for (int rank = signature.process_set; rank < size_; rank += 1 + signature.process_set) {
      if (random_() % 3 != 0 && in_flight_[key].count(rank) == 0) ranks.push_back(rank);
    }
    if (ranks.empty()) return;
    Message message = request_of(ranks, signature);
    const auto known = known_.find(key);
    if (known != known_.end() && signature.kind != HVL_ALLGATHER && known->second.second == signature) {
      message = ready_of(ranks, {known->second.first});
    }
    if (signature.kind == HVL_ALLGATHER) {
      for (int rank : ranks) message.varying.push_back(rank % 3);
      take_varying(&message.signature);
    }
    message.latest = ranks[random_() % ranks.size()];
    message.age = 1000 * (random_() % 5000);
    message.spread = ranks.size() > 1 ? 1000 * (random_() % 5000) : 0;
    for (int rank : ranks) in_flight_[key].emplace(rank, message.ids.empty() ? TensorId{0} : message.ids[0]);
    send(message);
  }

  void decide() {
    CHECK_EQ(at_once_.decide(), singly_.decide());
    REQUIRE(at_once_.last.size() == singly_.last.size());
    for (size_t i = 0; i < at_once_.last.size(); ++i) {
      const Record& record = at_once_.last[i].record;
      const Record& other = singly_.last[i].record;
      CHECK(record.signature == other.signature);
      CHECK(record.varying == other.varying);
      CHECK(record.absent == other.absent);
      CHECK_EQ(record.last_joined, other.last_joined);
      CHECK_EQ(record.text, other.text);
      num_executed += static_cast<int>(record.ids.size());
      num_without_all += record.type == Record::Type::kExecute && !record.absent.empty() ? 1 : 0;
      num_errors += record.type == Record::Type::kError ? 1 : 0;
      read(record);
    }
    const auto pending = at_once_.coordinator.pending();
    const auto others = singly_.coordinator.pending();
    REQUIRE(pending.size() == others.size());
    for (size_t i = 0; i < pending.size(); ++i) {
      CHECK_EQ(pending[i].name, others[i].name);
      CHECK_EQ(pending[i].since, others[i].since);
      CHECK(pending[i].ready == others[i].ready);
      CHECK(pending[i].missing == others[i].missing);
    }
    for (size_t rank = 0; rank < static_cast<size_t>(size_); ++rank) {
      CHECK_EQ(at_once_.coordinator.straggler_stats()[rank].waited, singly_.coordinator.straggler_stats()[rank].waited);
    }
    CHECK_EQ(at_once_.coordinator.negotiated_in_full(), singly_.coordinator.negotiated_in_full());
  }

  int num_executed = 0, num_without_all = 0, num_errors = 0;

 private:
  CoordinatorOptions options(int capacity) const {
    CoordinatorOptions options = options_of(size_);
    options.cache_capacity = capacity;
    return options;
  }

  Signature any_request() {
    const int32_t process_set = static_cast<int32_t>(random_() % 2);
    const std::string name(1, static_cast<char>('a' + random_() % 4));
    Signature signature = random_() % 8 == 0 ? join_of(process_set, random_() % 4 == 0 ? name : "join")
                                             : allreduce_of(name, {1 + static_cast<int64_t>(random_() % 6 == 0)});
    if (signature.kind != HVL_JOIN && name == "c") signature = allgather_of(name, {0, 3});
    signature.process_set = process_set;
    return signature;
  }

  void send(const Message& message) {
    CHECK_EQ(hear(&at_once_, message, now_ + 1000 * kMillisecond), "");
    const uint64_t last = now_ + 1000 * kMillisecond - message.age;
    size_t index = 0;
    std::map<int, size_t> index_of;
    message.ranks.for_each([&](int rank) { index_of[rank] = index++; });
    const auto send_one = [&](int rank, uint64_t when) {
      Message one = message;
      if (!message.varying.empty()) put_varying(&message.varying[index_of[rank]], 1, &one.signature);
      CHECK_EQ(singly_.coordinator.on_message(rank, one, when).message(), "");
    };
    for (const auto& [rank, at] : index_of) {
      if (rank != message.latest) send_one(rank, last - message.spread);
    }
    send_one(message.latest, last);
  }

  void read(const Record& record) {
    const auto forget = [&](const std::string& key) {
      auto& ranks = in_flight_[key];
      for (auto one = ranks.begin(); one != ranks.end();) {
        const bool is_absent = std::binary_search(record.absent.begin(), record.absent.end(), one->first);
        one = is_absent ? std::next(one) : ranks.erase(one);
      }
    };
    switch (record.type) {
      case Record::Type::kDefine: {
        const std::string key = std::to_string(record.signature.process_set) + record.signature.name;
        if (record.replaces != 0) drop(record.replaces);
        known_[key] = {record.id, record.signature};
        keys_[record.id] = key;
        break;
      }
      case Record::Type::kExecute:
        for (TensorId id : record.ids) forget(keys_.at(id));
        break;
      case Record::Type::kError: forget(std::to_string(record.signature.process_set) + record.signature.name); break;
      case Record::Type::kEvict:
        for (TensorId id : record.ids) drop(id);
        break;
      case Record::Type::kShutdown: CHECK(false);
    }
  }

  // An announcement by the id, made after both had decided that it is no longer defined, has no effect. (Ranks whose
  // announcement counts for the id that replaces it run that next.)
  void drop(TensorId id) {
    const std::string key = keys_[id];  // none: of the process set
    const auto known = known_.find(key);
    if (known != known_.end() && known->second.first == id) known_.erase(known);
    auto& ranks = in_flight_[key];
    for (auto one = ranks.begin(); one != ranks.end();) one = one->second == id ? ranks.erase(one) : std::next(one);
  }

  int size_;
  uint64_t now_ = 0;
  std::mt19937 random_;
  CoordinatorDriver at_once_, singly_;
  std::map<std::string, std::map<int, TensorId>> in_flight_;  // by process set and name: ranks, and by which id
  std::map<std::string, std::pair<TensorId, Signature>> known_;
  std::map<TensorId, std::string> keys_;
};

}  // namespace

TEST(any_sequence_has_the_same_effect) {
  int executed = 0, without_all = 0, errors = 0;
  for (int size : {2, 3, 7, 70}) {
    for (int capacity : {1024, 2}) {
      for (unsigned seed = 0; seed < 20; ++seed) {
        TwoCoordinators both(size, capacity, seed);
        for (int i = 0; i < 500; ++i) both.step();
        both.decide();
        executed += both.num_executed;
        without_all += both.num_without_all;
        errors += both.num_errors;
      }
    }
  }
  CHECK(executed > 10000);
  CHECK(without_all > 100);
  CHECK(errors > 100);
}
