#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "check.h"
#include "coordinator_driver.h"

using namespace hvl;

namespace {

constexpr int kSizes[] = {1, 2, 3, 4, 16, 65};

CoordinatorOptions with_threshold(int size, int64_t threshold, int max_batch = 4096) {
  CoordinatorOptions options = options_of(size);
  options.fusion_threshold = threshold;
  options.max_batch = max_batch;
  return options;
}

CoordinatorOptions with_capacity(int size, int capacity) {
  CoordinatorOptions options = options_of(size);
  options.cache_capacity = capacity;
  return options;
}

// Defines ids 1, 2, ... for tensors "1", "2", ... of 16 bytes.
void define(CoordinatorDriver* driver, int count) {
  for (int i = 1; i <= count; ++i) driver->request_all(allreduce_of(std::to_string(i)));
  driver->decide();
}

}  // namespace

TEST(executed_when_the_last_rank_is_ready) {
  for (int size : kSizes) {
    CoordinatorDriver driver(size);
    for (int rank = 0; rank < size; ++rank) {
      CHECK_EQ(driver.decide(), "");
      CHECK_EQ(driver.request(rank, allreduce_of("a")), "");
    }
    CHECK_EQ(driver.decide(), "define 1 a; execute 1");
    CHECK(driver.last[0].record.signature == allreduce_of("a"));
    CHECK(driver.last[0].record.varying.empty());
    CHECK_EQ(driver.decide(), "");
    for (int round = 0; round < 3; ++round) {
      for (int rank = size - 1; rank >= 0; --rank) {
        CHECK_EQ(driver.decide(), "");
        CHECK_EQ(driver.ready(rank, {1}), "");
      }
      CHECK_EQ(driver.decide(), "execute 1");
    }
    CHECK_EQ(driver.coordinator.negotiated_in_full(), size);
  }
}

TEST(every_order_of_arrival_executes_everything_once) {
  constexpr int kCount = 100;
  for (int size : kSizes) {
    std::mt19937 random(static_cast<unsigned>(size));
    CoordinatorDriver driver(size);
    define(&driver, kCount);
    for (int round = 0; round < 5; ++round) {
      std::vector<std::pair<int, TensorId>> arrivals;
      for (int rank = 0; rank < size; ++rank) {
        for (TensorId id = 1; id <= kCount; ++id) arrivals.emplace_back(rank, id);
      }
      std::shuffle(arrivals.begin(), arrivals.end(), random);
      std::map<TensorId, int> counts;
      std::vector<TensorId> expected, executed;
      for (const auto& [rank, id] : arrivals) {
        REQUIRE(driver.coordinator.on_ready(rank, id, 0).ok());
        if (++counts[id] == size) expected.push_back(id);
        if (random() % 50 != 0) continue;
        driver.decide();
        for (const Decision& d : driver.last) executed.insert(executed.end(), d.record.ids.begin(), d.record.ids.end());
      }
      driver.decide();
      for (const Decision& d : driver.last) executed.insert(executed.end(), d.record.ids.begin(), d.record.ids.end());
      CHECK(executed == expected);
      CHECK(driver.coordinator.pending().empty());
    }
  }
}

TEST(a_changed_request_defines_the_id_again) {
  CoordinatorDriver driver(3);
  driver.request_all(allreduce_of("a"));
  driver.decide();
  driver.request_all(allreduce_of("a", {9}));
  CHECK_EQ(driver.decide(), "define 1 a; execute 1");
  CHECK(driver.last[0].record.signature == allreduce_of("a", {9}));
  CHECK_EQ(driver.last[0].reason.text(), "1 tensor, 36 bytes, changed since the last use of the name");
  driver.ready_all({1});
  CHECK_EQ(driver.decide(), "execute 1");
  CHECK_EQ(driver.last[0].reason.text(), "1 tensor, 36 bytes, all ranks ready");
  driver.request_all(allreduce_of("a", {9}));  // in full though nothing changed
  CHECK_EQ(driver.decide(), "execute 1");
  driver.request_all(broadcast_of("a", 2));  // the same name for something else
  CHECK_EQ(driver.decide(), "define 1 a; execute 1");
}

TEST(some_ranks_ready_by_id_and_others_in_full) {
  CoordinatorDriver driver(3);
  driver.request_all(allreduce_of("a"));
  driver.decide();
  driver.ready(0, {1});
  driver.request(1, allreduce_of("a", {5}));
  driver.ready(2, {1});
  CHECK_EQ(driver.decide(), "error a");
  CHECK_EQ(driver.last[0].record.text, "Mismatched shapes for allreduce 'a': ranks 0, 2 have [4], rank 1 has [5].");
  CHECK_EQ(driver.last[0].record.status, HVL_MISMATCH);
  // The id stands for what it stood for before.
  driver.ready_all({1});
  CHECK_EQ(driver.decide(), "execute 1");
  driver.request(0, allreduce_of("a"));
  driver.ready(1, {1});
  driver.ready(2, {1});
  CHECK_EQ(driver.decide(), "execute 1");
}

TEST(allgather_tells_every_ranks_rows) {
  CoordinatorDriver driver(3);
  Signature group = allgather_of("g", {1, 5});
  group.tensors.push_back({HVL_INT8, {0}});
  for (int rank : {2, 0, 1}) {
    group.tensors[0].shape[0] = rank;       // 0 1 2
    group.tensors[1].shape[0] = 10 - rank;  // 10 9 8
    driver.request(rank, group);
  }
  CHECK_EQ(driver.decide(), "define 1 g; execute 1");
  const Record first = driver.last[0].record;
  CHECK(first.varying == std::vector<int64_t>({0, 10, 1, 9, 2, 8}));
  CHECK(first.signature.tensors[0].shape == Shape({3, 5}));
  CHECK(first.signature.tensors[1].shape == Shape({27}));

  driver.ready(0, {1});  // rows as before
  driver.ready(2, {1});
  group.tensors[0].shape[0] = 7;
  group.tensors[1].shape[0] = 9;
  driver.request(1, group);
  CHECK_EQ(driver.decide(), "define 1 g; execute 1");
  CHECK(driver.last[0].record.varying == std::vector<int64_t>({0, 10, 7, 9, 2, 8}));
  CHECK(driver.last[0].record.signature.tensors[0].shape == Shape({9, 5}));
  driver.ready_all({1});
  CHECK_EQ(driver.decide(), "execute 1");
}

TEST(allreduces_are_fused_up_to_the_threshold) {
  const auto log = [](int64_t threshold, int max_batch) {
    CoordinatorDriver driver(with_threshold(2, threshold, max_batch));
    define(&driver, 5);
    driver.ready_all({1, 2, 3, 4, 5});
    return driver.decide();
  };
  CHECK_EQ(log(1 << 20, 4096), "execute 1 2 3 4 5");
  CHECK_EQ(log(80, 4096), "execute 1 2 3 4 5");
  CHECK_EQ(log(79, 4096), "execute 1 2 3 4; execute 5");
  CHECK_EQ(log(32, 4096), "execute 1 2; execute 3 4; execute 5");
  CHECK_EQ(log(0, 4096), "execute 1; execute 2; execute 3; execute 4; execute 5");
  CHECK_EQ(log(1, 4096), "execute 1; execute 2; execute 3; execute 4; execute 5");
  CHECK_EQ(log(1 << 20, 2), "execute 1 2; execute 3 4; execute 5");
}

TEST(a_tensor_above_the_threshold_is_alone) {
  CoordinatorDriver driver(with_threshold(2, 100));
  driver.request_all(allreduce_of("small"));
  driver.request_all(allreduce_of("large", {1000}));
  driver.request_all(allreduce_of("empty", {0}));
  driver.request_all(allreduce_of("other", {25}));
  CHECK_EQ(driver.decide(),
           "define 1 small; define 2 large; execute 1; define 3 empty; execute 2; define 4 other; execute 3 4");
  CHECK_EQ(driver.last[2].reason.text(), "1 tensor, 16 bytes, all ranks ready");
  CHECK_EQ(driver.last[6].reason.text(), "2 tensors, 100 bytes, all ranks ready");
}

TEST(other_kinds_are_alone_and_in_order) {
  CoordinatorDriver driver(2);
  driver.request_all(allreduce_of("1"));
  driver.request_all(broadcast_of("2", 1));
  driver.request_all(allgather_of("3", {2}));
  driver.request_all(barrier_of("4"));
  driver.request_all(allreduce_of("5"));
  driver.request_all(allreduce_of("6"));
  driver.decide();
  driver.ready_all({1, 2, 3, 4, 5, 6});
  CHECK_EQ(driver.decide(), "execute 1; execute 2; execute 3; execute 4; execute 5 6");
  CHECK_EQ(driver.last[3].reason.text(), "barrier, all ranks ready");
}

TEST(devices_have_batches_of_their_own) {
  CoordinatorDriver driver(2);
  for (int i = 1; i <= 4; ++i) {
    Signature signature = allreduce_of(std::to_string(i));
    signature.device = i % 2 == 0 ? HVL_CUDA : HVL_CPU;
    driver.request_all(signature);
  }
  driver.decide();
  driver.ready_all({2, 1, 3, 4});
  CHECK_EQ(driver.decide(), "execute 2 4; execute 1 3");
}

TEST(a_group_is_one_id_and_stays_whole) {
  CoordinatorDriver driver(with_threshold(2, 40));
  Signature group = allreduce_of("group");
  group.tensors.push_back({HVL_BFLOAT16, {3, 3}});
  group.tensors.push_back({HVL_FLOAT64, {}});
  driver.request_all(allreduce_of("before"));
  driver.request_all(group);
  CHECK_EQ(driver.decide(), "define 1 before; define 2 group; execute 1; execute 2");
  CHECK_EQ(driver.last[3].reason.text(), "3 tensors, 42 bytes, all ranks ready");
}

TEST(the_least_recently_used_ids_are_evicted) {
  CoordinatorDriver driver(with_capacity(2, 3));
  define(&driver, 3);
  driver.ready_all({1});
  CHECK_EQ(driver.decide(), "execute 1");
  driver.request_all(allreduce_of("4"));
  CHECK_EQ(driver.decide(), "define 4 4; execute 4; evict 2");
  CHECK_EQ(driver.last[2].reason.text(), "least recently used of 4 known tensors");
  driver.request_all(allreduce_of("2"));  // comes back under another id
  CHECK_EQ(driver.decide(), "define 5 2; execute 5; evict 3");
  driver.ready_all({1, 4, 5});
  CHECK_EQ(driver.decide(), "execute 1 4 5");
}

TEST(an_id_that_a_rank_waits_for_is_not_evicted) {
  CoordinatorDriver driver(with_capacity(2, 2));
  define(&driver, 2);
  driver.ready(1, {1});
  driver.request_all(allreduce_of("3"));
  CHECK_EQ(driver.decide(), "define 3 3; execute 3; evict 2");
  driver.ready(1, {3});
  driver.request_all(allreduce_of("4"));
  CHECK_EQ(driver.decide(), "define 4 4; execute 4; evict 4");  // the only one in use by nobody
  CHECK_EQ(driver.request(0, allreduce_of("4")), "");
  driver.ready(0, {1, 3});
  CHECK_EQ(driver.decide(), "execute 1 3");
  driver.request(1, allreduce_of("4"));
  CHECK_EQ(driver.decide(), "define 5 4; execute 5; evict 1");
}

TEST(more_ids_than_the_capacity_while_all_are_in_use) {
  CoordinatorDriver driver(with_capacity(2, 2));
  define(&driver, 2);
  driver.ready(0, {1, 2});
  driver.request(0, allreduce_of("3"));
  driver.request(0, allreduce_of("4"));
  driver.request(1, allreduce_of("3"));
  CHECK_EQ(driver.decide(), "define 3 3; execute 3; evict 3");
  driver.ready(1, {1, 2});
  driver.request(1, allreduce_of("4"));
  CHECK_EQ(driver.decide(), "define 4 4; execute 1 2 4; evict 1");
}

TEST(no_cache_at_all) {
  CoordinatorDriver driver(with_capacity(2, 0));
  driver.request_all(allreduce_of("a"));
  driver.request_all(allreduce_of("b"));
  CHECK_EQ(driver.decide(), "define 1 a; define 2 b; execute 1 2; evict 1 2");
  driver.request_all(allreduce_of("a"));
  CHECK_EQ(driver.decide(), "define 3 a; execute 3; evict 3");
}

TEST(an_evicted_id_that_is_still_under_way_is_ignored) {
  CoordinatorDriver driver(with_capacity(2, 1));
  define(&driver, 1);
  driver.request_all(allreduce_of("2"));
  CHECK_EQ(driver.decide(), "define 2 2; execute 2; evict 1");
  CHECK_EQ(driver.ready(0, {1}), "");  // rank 0 has not read the last record yet
  CHECK_EQ(driver.decide(), "");
  CHECK(driver.coordinator.pending().empty());
  CHECK_EQ(driver.request(1, allreduce_of("1")), "");
  CHECK_EQ(driver.request(0, allreduce_of("1")), "");  // now it has
  CHECK_EQ(driver.decide(), "define 3 1; execute 3; evict 2");
}

TEST(pending_names_who_is_missing_oldest_first) {
  CoordinatorDriver driver(3);
  define(&driver, 2);
  driver.request(2, broadcast_of("new", 0), 100);
  driver.ready(1, {2}, 200);
  driver.ready(0, {1, 2}, 300);
  driver.ready(1, {1}, 400);
  const std::vector<Pending> pending = driver.coordinator.pending();
  REQUIRE(pending.size() == 3);
  CHECK_EQ(pending[0].name, "new");
  CHECK(pending[0].kind == HVL_BROADCAST);
  CHECK(pending[0].ready == std::vector<int>({2}));
  CHECK(pending[0].missing == std::vector<int>({0, 1}));
  CHECK_EQ(pending[0].since, 100);
  CHECK_EQ(pending[1].name, "2");
  CHECK_EQ(pending[1].since, 200);
  CHECK(pending[1].missing == std::vector<int>({2}));
  CHECK_EQ(pending[2].name, "1");
  CHECK_EQ(pending[2].since, 300);
  CHECK_EQ(driver.coordinator.pending(200).size(), 2);
  CHECK_EQ(driver.coordinator.pending(99).size(), 0);
  driver.ready(2, {1, 2}, 500);
  CHECK_EQ(driver.coordinator.pending().size(), 1);
}

TEST(shutdown_is_last) {
  CoordinatorDriver driver(2);
  define(&driver, 3);
  driver.ready_all({2});
  driver.ready(0, {1});
  CHECK_EQ(driver.shut_down(1, "done early"), "");
  CHECK_EQ(driver.ready(1, {1}), "");
  CHECK_EQ(driver.ready(1, {1}), "");  // not even an error
  CHECK_EQ(driver.request(1, allreduce_of("x")), "");
  CHECK_EQ(driver.shut_down(0, ""), "");
  CHECK_EQ(driver.decide(), "execute 2; shutdown");
  CHECK_EQ(driver.last[1].record.text, "rank 1 has shut the job down: done early");
  CHECK_EQ(driver.last[1].record.status, HVL_SHUT_DOWN);
  CHECK_EQ(driver.ready(0, {3}), "");
  CHECK_EQ(driver.ready(1, {3}), "");
  CHECK_EQ(driver.decide(), "");

  CoordinatorDriver silent(1);
  silent.shut_down(0, "");
  CHECK_EQ(silent.decide(), "shutdown");
  CHECK_EQ(silent.last[0].record.text, "rank 0 has shut the job down");
}

TEST(messages_that_no_correct_rank_sends) {
  CoordinatorDriver driver(2);
  define(&driver, 2);
  CHECK_EQ(driver.ready(0, {1}), "");
  CHECK_EQ(driver.ready(0, {1}), "Protocol error: rank 0 announced '1' again before it was executed.");
  CHECK_EQ(driver.request(0, allreduce_of("1")), "Protocol error: rank 0 announced '1' again before it was executed.");
  CHECK_EQ(driver.request(1, allreduce_of("new")), "");
  CHECK_EQ(driver.request(1, allreduce_of("new")),
           "Protocol error: rank 1 announced 'new' again before it was executed.");
  CHECK_EQ(driver.ready(0, {3}), "Protocol error: rank 0 announced the unknown tensor id 3.");  // "new": not yet told
  CHECK_EQ(driver.ready(1, {99}), "Protocol error: rank 1 announced the unknown tensor id 99.");
  CHECK_EQ(driver.ready(1, {0}), "Protocol error: rank 1 announced the unknown tensor id 0.");
  CHECK_EQ(driver.ready(2, {1}), "Protocol error: rank 2 does not exist.");
  CHECK_EQ(driver.ready(-1, {1}), "Protocol error: rank -1 does not exist.");
  Message message;
  message.type = static_cast<Message::Type>(9);
  CHECK_EQ(driver.coordinator.on_message(0, message, 0).code(), HVL_JOB_BROKEN);
}

TEST(many_names_once_each) {
  CoordinatorDriver driver(with_capacity(2, 10));
  std::set<TensorId> ids;
  constexpr int kCount = 20000;
  for (int i = 0; i < kCount; ++i) {
    driver.request_all(allreduce_of("allreduce.noname." + std::to_string(i)));
    driver.decide();
    REQUIRE(driver.last.size() >= 2);
    ids.insert(driver.last[0].record.id);
  }
  CHECK_EQ(ids.size(), kCount);
}
