// The coordinator's process sets, and ranks that have joined.

#include "check.h"
#include "coordinator_driver.h"

namespace hvl {
namespace {

Signature change_of(Kind kind, const std::vector<int64_t>& arguments) {
  Signature signature;
  signature.name = kind == HVL_ADD_PROCESS_SET ? "add" : "remove";
  signature.kind = kind;
  signature.arguments = arguments;
  return signature;
}

TEST(only_members_are_needed) {
  CoordinatorDriver driver(3);
  driver.request_all(change_of(HVL_ADD_PROCESS_SET, {0, 2}));
  CHECK_EQ(driver.decide(), "define 1 add; execute 1");
  driver.request(2, of_set(1, allreduce_of("x")));
  CHECK_EQ(driver.decide(), "");
  driver.request(0, of_set(1, allreduce_of("x")));
  CHECK_EQ(driver.decide(), "define 2 x; execute 2");
  CHECK(driver.request(1, of_set(1, allreduce_of("x"))).find("no member") != std::string::npos);
}

TEST(sets_have_batches_and_names_of_their_own) {
  CoordinatorDriver driver(2);
  driver.request_all(change_of(HVL_ADD_PROCESS_SET, {0}));
  driver.decide();
  driver.request_all(allreduce_of("x"));
  driver.request(0, of_set(1, allreduce_of("x", {7})));
  driver.request_all(allreduce_of("y"));
  CHECK_EQ(driver.decide(), "define 2 x; define 3 x; define 4 y; execute 2 4; execute 3");
}

TEST(ids_are_the_lowest_that_are_free) {
  CoordinatorDriver driver(3);
  for (int64_t rank : {0, 1, 2}) driver.request_all(change_of(HVL_ADD_PROCESS_SET, {rank}));
  driver.decide();
  driver.request_all(change_of(HVL_REMOVE_PROCESS_SET, {2}));  // of rank 1
  driver.request_all(change_of(HVL_ADD_PROCESS_SET, {0, 1}));
  driver.decide();
  CHECK_EQ(driver.request(0, of_set(2, allreduce_of("x"))), "");
  CHECK_EQ(driver.request(1, of_set(2, allreduce_of("x"))), "");
  CHECK_HAS(driver.decide(), "execute");
}

TEST(changes_that_cannot_be_made) {
  CoordinatorDriver driver(3);
  const auto error_of = [&](const Signature& signature) {
    driver.request_all(signature);
    driver.decide();
    return driver.last.back().record.text;
  };
  error_of(change_of(HVL_ADD_PROCESS_SET, {0, 1}));
  CHECK_EQ(error_of(change_of(HVL_ADD_PROCESS_SET, {0, 1})), "Process set 1 has the same ranks already: ranks 0, 1.");
  CHECK_EQ(error_of(change_of(HVL_ADD_PROCESS_SET, {0, 1, 2})),
           "Process set 0 has the same ranks already: ranks 0, 1, 2.");
  CHECK_EQ(error_of(change_of(HVL_ADD_PROCESS_SET, {1, 3})),
           "A process set is made of ranks from 0 to 2, not of [1, 3].");
  for (int64_t id : {0, 2}) {
    CHECK_EQ(error_of(change_of(HVL_REMOVE_PROCESS_SET, {id})),
             "There is no process set " + std::to_string(id) + " that could be removed.");
  }
  driver.request(0, change_of(HVL_ADD_PROCESS_SET, {0}));
  driver.request(1, change_of(HVL_ADD_PROCESS_SET, {0}));
  driver.request(2, change_of(HVL_ADD_PROCESS_SET, {1}));
  driver.decide();
  CHECK_HAS(driver.last.back().record.text, "ranks 0, 1 have [0], rank 2 has [1]");
}

TEST(a_set_that_its_members_add) {
  CoordinatorDriver driver(4);
  Signature addition = change_of(HVL_ADD_PROCESS_SET, {1, 3});
  addition.root = 1;
  driver.request(3, addition);
  CHECK_EQ(driver.decide(), "");
  const std::vector<Pending> pending = driver.coordinator.pending(1);
  CHECK_EQ(pending.size(), 1u);
  CHECK(pending[0].missing == std::vector<int>{1});
  driver.request(1, addition);
  CHECK_EQ(driver.decide(), "define 1 add; execute 1");
  CHECK(driver.last.back().record.absent == (std::vector<int32_t>{0, 2}));
  for (int rank : {1, 3}) CHECK_EQ(driver.request(rank, of_set(1, allreduce_of("x"))), "");
  CHECK_EQ(driver.decide(), "define 2 x; execute 2");
  // All ranks may add a set of the same ranks, and the members another one.
  addition.root = -1;
  addition.name = "all";
  driver.request_all(addition);
  CHECK_EQ(driver.decide(), "define 3 all; execute 3");
  for (int rank : {1, 3}) driver.ready(rank, {1});
  CHECK_EQ(driver.decide(), "execute 1");
  for (int rank : {1, 3}) CHECK_EQ(driver.request(rank, of_set(3, allreduce_of("y"))), "");
  CHECK_EQ(driver.decide(), "define 4 y; execute 4");
}

TEST(a_set_that_its_members_add_while_others_have_joined) {
  CoordinatorDriver driver(3);
  Signature addition = change_of(HVL_ADD_PROCESS_SET, {0, 1});
  addition.root = 0;
  driver.request(0, addition);
  driver.request(2, join_of());
  CHECK_EQ(driver.decide(), "");
  driver.request(1, addition);
  CHECK_EQ(driver.decide(), "define 1 add; execute 1");
  for (int rank : {0, 1}) driver.request(rank, join_of());
  CHECK_EQ(driver.decide(), "define 2 join; execute 2");
}

TEST(what_is_pending_on_a_set_that_is_removed_fails) {
  CoordinatorDriver driver(2);
  driver.request_all(change_of(HVL_ADD_PROCESS_SET, {0}));
  driver.decide();
  driver.request(0, of_set(1, allreduce_of("done")));
  driver.decide();
  driver.request_all(change_of(HVL_REMOVE_PROCESS_SET, {1}));
  driver.request(0, of_set(1, allreduce_of("late")));  // complete, but after the removal
  CHECK_EQ(driver.decide(), "define 3 remove; error late; evict 2; execute 3");
  driver.request(0, of_set(1, allreduce_of("gone")));
  CHECK_EQ(driver.decide(), "error gone");
}

TEST(a_rank_that_has_joined_is_not_needed) {
  CoordinatorDriver driver(3);
  driver.request_all(allreduce_of("x"));
  driver.request_all(allreduce_of("y"));
  driver.decide();
  driver.ready(0, {1});
  driver.ready(1, {1});
  driver.request(2, join_of());
  CHECK_EQ(driver.decide(), "execute 1");
  CHECK(driver.last[0].record.absent == std::vector<int32_t>({2}));
  driver.ready(1, {1, 2});
  driver.request(0, join_of());
  CHECK_EQ(driver.decide(), "execute 1 2");  // one batch
  CHECK(driver.last[0].record.absent == std::vector<int32_t>({0, 2}));
  driver.request(1, join_of());
  CHECK_EQ(driver.decide(), "define 3 join; execute 3");
  CHECK_EQ(driver.last[1].record.last_joined, 1);

  driver.ready(0, {1});  // all are needed again
  driver.ready(1, {1});
  CHECK_EQ(driver.decide(), "");
  driver.ready(2, {1});
  CHECK_EQ(driver.decide(), "execute 1");
  CHECK(driver.last[0].record.absent.empty());
}

TEST(what_a_rank_had_ready_before_it_joined_is_done_with_it) {
  CoordinatorDriver driver(2);
  driver.request(0, allreduce_of("x"));
  driver.request(0, join_of());
  CHECK_EQ(driver.decide(), "");
  driver.request(1, allreduce_of("y"));
  driver.request(1, allreduce_of("x"));
  CHECK_EQ(driver.decide(), "define 3 y; define 1 x; execute 3; execute 1");
  CHECK(driver.last[2].record.absent == std::vector<int32_t>({0}));
  CHECK(driver.last[3].record.absent.empty());
}

TEST(another_thread_of_a_rank_that_has_joined_goes_on) {
  CoordinatorDriver driver(2);
  driver.request_all(allreduce_of("x"));
  driver.decide();
  driver.request(0, join_of());
  driver.ready(1, {1});  // complete without rank 0
  driver.ready(0, {1});  // of another thread: for the next time
  CHECK_EQ(driver.decide(), "execute 1");
  CHECK(driver.last[0].record.absent == std::vector<int32_t>({0}));
  driver.ready(1, {1});
  CHECK_EQ(driver.decide(), "execute 1");
  CHECK(driver.last[0].record.absent.empty());
}

TEST(joins_of_sets) {
  CoordinatorDriver driver(3);
  driver.request_all(change_of(HVL_ADD_PROCESS_SET, {0, 1}));
  driver.decide();
  driver.request(0, join_of(1));
  driver.request(1, of_set(1, allreduce_of("x")));
  CHECK_EQ(driver.decide(), "define 3 x; execute 3");
  driver.request_all(allreduce_of("x"));  // of all ranks: nobody has joined there
  CHECK_EQ(driver.decide(), "define 4 x; execute 4");
  CHECK(driver.last[1].record.absent.empty());
}

TEST(what_needs_a_rank_that_has_joined_fails) {
  CoordinatorDriver driver(3);
  driver.request(2, join_of());
  for (Kind kind : {HVL_BROADCAST, HVL_GATHER, HVL_SCATTER, HVL_REDUCE}) {
    for (int rank : {0, 1}) driver.request(rank, rooted_of(kind, name_of(kind), 2));
    CHECK_HAS(driver.decide(), std::string("error ") + name_of(kind));
    CHECK_EQ(driver.last[1].record.text,
             name_of(kind) + std::string(" '") + name_of(kind) + "' needs rank 2, which has joined.");
    for (int rank : {0, 1}) driver.request(rank, rooted_of(kind, "of 0", 0));
    CHECK_HAS(driver.decide(), "execute");
    CHECK(driver.last.back().record.absent == std::vector<int32_t>({2}));
  }
  for (int rank : {0, 1}) driver.request(rank, change_of(HVL_ADD_PROCESS_SET, {0}));
  driver.decide();
  CHECK_HAS(driver.last.back().record.text, "needs rank 2, which has joined");
}

TEST(an_allgather_without_a_rank_has_no_rows_of_it) {
  for (const Signature& gather : {allgather_of("g", {5, 2}), rooted_of(HVL_GATHER, "g", 1, {5, 2})}) {
    CoordinatorDriver driver(2);
    driver.request(0, join_of());
    driver.request(1, gather);
    CHECK_EQ(driver.decide(), "define 2 g; execute 2");
    CHECK(driver.last[0].record.varying == std::vector<int64_t>({0, 5}));
  }
}

TEST(a_rank_that_joins_early_is_no_stall) {
  CoordinatorDriver driver(2);
  driver.request(0, join_of());
  driver.decide();
  CHECK_EQ(driver.coordinator.pending().size(), size_t{0});
}

TEST(a_join_and_more_in_one_message) {
  CoordinatorDriver driver(3);
  for (int rank : {0, 1, 2}) driver.request(rank, join_of());
  driver.request_all(broadcast_of("b", 0));
  driver.decide();  // the join is 1, b is 2
  driver.ready(1, {2});
  driver.ready(2, {2});
  driver.ready(0, {1, 2});
  CHECK_EQ(driver.decide(), "error b");  // of those that have not joined; rank 0 has b ready for the next time
  CHECK(driver.last[0].record.absent == std::vector<int32_t>({0}));
}

// A rank that was absent may still mean what the id stood for before.
TEST(what_changes_without_a_rank_gets_another_id) {
  CoordinatorDriver driver(3);
  driver.request_all(allreduce_of("x"));
  driver.decide();
  driver.request(1, join_of());
  for (int rank : {0, 2}) driver.request(rank, allreduce_of("x", {8}));
  CHECK_EQ(driver.decide(), "define 3 x for 1; execute 3");
  CHECK(driver.last[0].record.absent == std::vector<int32_t>({1}));
  CHECK(driver.last[1].record.absent == std::vector<int32_t>({1}));

  CHECK_EQ(driver.ready(1, {1}), "");  // of another thread, which has not read that; it asks again when it has
  for (int rank : {0, 2}) driver.ready(rank, {3});
  CHECK_EQ(driver.decide(), "execute 3");
  CHECK(driver.last[0].record.absent == std::vector<int32_t>({1}));
  driver.request(1, allreduce_of("x"));
  for (int rank : {0, 2}) driver.ready(rank, {3});
  CHECK_EQ(driver.decide(), "error x");
  CHECK_EQ(driver.last[0].record.text, "Mismatched shapes for allreduce 'x': ranks 0, 2 have [8], rank 1 has [4].");
  CHECK(driver.last[0].record.absent.empty());
  driver.request_all(allreduce_of("x", {9}));  // with everybody
  CHECK_EQ(driver.decide(), "define 3 x; execute 3");
}

TEST(what_was_announced_by_the_old_id_counts_for_the_new_one) {
  CoordinatorDriver driver(3);
  driver.request_all(allgather_of("g", {2}));
  driver.decide();
  driver.request(2, join_of());
  driver.ready(1, {1});
  driver.request(0, allgather_of("g", {5}));
  CHECK_EQ(driver.decide(), "define 3 g for 1; execute 3");
  CHECK(driver.last[0].record.varying == std::vector<int64_t>({5, 2, 0}));
  for (int rank : {0, 1}) driver.ready(rank, {3});
  CHECK_EQ(driver.decide(), "execute 3");
}

// All ranks learn that the join failed, and are needed for the operations that follow.
void check_refused_join(CoordinatorDriver* driver, const std::string& text) {
  CHECK_EQ(driver->decide(), "error x");
  CHECK_EQ(driver->last[0].record.text, text);
  CHECK(driver->last[0].record.absent.empty());
  for (int missing : {0, 1, 2}) {
    const std::string name = "without " + std::to_string(missing);
    for (int rank : {0, 1, 2}) {
      if (rank != missing) driver->request(rank, allreduce_of(name));
    }
    CHECK_EQ(driver->decide(), "");
    CHECK_EQ(driver->coordinator.pending().size(), size_t{1});
    driver->request(missing, allreduce_of(name));
    CHECK_HAS(driver->decide(), "execute");
    CHECK(driver->last.back().record.absent.empty());
  }
}

TEST(an_operation_with_the_name_of_a_join) {
  for (int joins : {0, 1, 2}) {
    CoordinatorDriver driver(3);
    for (int rank : {0, 1, 2}) driver.request(rank, rank == joins ? join_of(0, "x") : allreduce_of("x"));
    std::string others = joins == 0 ? "1, 2" : joins == 1 ? "0, 2" : "0, 1";
    check_refused_join(&driver, "Mismatched operations for 'x': ranks " + others + " have allreduce, rank " +
                                    std::to_string(joins) + " has join.");
  }
}

TEST(an_operation_that_waits_for_ranks_which_join_under_its_name_is_a_stall) {
  CoordinatorDriver driver(3);
  driver.request(0, join_of(0, "x"));
  CHECK_EQ(driver.coordinator.pending().size(), size_t{0});
  driver.request(1, allreduce_of("x"));
  CHECK_EQ(driver.coordinator.pending().size(), size_t{1});
}

TEST(a_join_with_the_name_of_a_known_operation) {
  CoordinatorDriver driver(3);
  driver.request_all(allreduce_of("x"));
  driver.decide();
  driver.request(0, join_of(0, "x"));
  for (int rank : {1, 2}) driver.ready(rank, {1});
  check_refused_join(&driver, "Mismatched operations for 'x': ranks 1, 2 have allreduce, rank 0 has join.");
  driver.request_all(join_of(0, "x"));
  CHECK(driver.decide().find("define 1 x; execute 1") == 0);
  driver.request(0, allreduce_of("x"));
  for (int rank : {1, 2}) driver.ready(rank, {1});
  check_refused_join(&driver, "Mismatched operations for 'x': ranks 1, 2 have join, rank 0 has allreduce.");
}

TEST(what_goes_on_without_a_rank_until_its_join_is_refused) {
  CoordinatorDriver driver(3);
  driver.request(0, join_of(0, "x"));
  driver.request(1, allreduce_of("x"));
  for (int rank : {1, 2}) driver.request(rank, allreduce_of("y"));
  CHECK_EQ(driver.decide(), "define 2 y; execute 2");
  CHECK(driver.last[1].record.absent == std::vector<int32_t>({0}));
  driver.ready(1, {2});
  driver.request(2, allreduce_of("x"));
  CHECK_EQ(driver.decide(), "error x");
  driver.ready(2, {2});
  CHECK_EQ(driver.decide(), "");
  driver.request(0, allreduce_of("y"));
  CHECK_EQ(driver.decide(), "execute 2");
}

TEST(a_join_needs_those_that_have_joined_under_another_name) {
  CoordinatorDriver driver(3);
  driver.request(2, join_of());
  for (int rank : {0, 1}) driver.request(rank, join_of(0, "x"));
  CHECK_EQ(driver.decide(), "");
  driver.request(2, join_of(0, "x"));  // of another thread
  CHECK_EQ(driver.decide(), "define 2 x; execute 2");
  CHECK(driver.last[1].record.absent.empty());
  for (int rank : {0, 1}) driver.request(rank, join_of());
  CHECK_EQ(driver.decide(), "define 1 join; execute 1");
  driver.request_all(allreduce_of("y"));
  CHECK_EQ(driver.decide(), "define 3 y; execute 3");
  CHECK(driver.last[1].record.absent.empty());
}

TEST(a_refused_join_under_the_name_of_something_known_while_another_rank_has_joined) {
  CoordinatorDriver driver(3);
  driver.request_all(allreduce_of("x"));
  driver.decide();
  driver.request(2, join_of());
  for (int rank : {0, 1}) driver.request(rank, join_of(0, "x"));
  CHECK_HAS(driver.decide(), "error x");
  CHECK_EQ(driver.last.back().record.text, "join 'x' needs rank 2, which has joined.");
  driver.request(0, allreduce_of("y"));
  CHECK_EQ(driver.decide(), "");  // rank 1 is needed
  driver.request(1, allreduce_of("y"));
  CHECK_HAS(driver.decide(), "execute");
  CHECK(driver.last.back().record.absent == std::vector<int32_t>({2}));
}

TEST(what_was_refused_when_it_was_defined_is_evicted_in_its_turn) {
  CoordinatorOptions options = options_of(2);
  options.cache_capacity = 3;
  CoordinatorDriver driver(options);
  driver.request_all(change_of(HVL_ADD_PROCESS_SET, {1}));
  driver.decide();
  driver.request(1, join_of());
  driver.request(0, broadcast_of("b", 1));
  CHECK_EQ(driver.decide(), "define 3 b; error b");
  driver.request(0, join_of());
  CHECK_EQ(driver.decide(), "define 2 join; execute 2");
  driver.request_all(allreduce_of("x"));
  CHECK_EQ(driver.decide(), "define 4 x; execute 4; evict 1");
  driver.request_all(allreduce_of("y"));
  CHECK_EQ(driver.decide(), "define 5 y; execute 5; evict 3");
}

TEST(ready_of_a_rank_that_is_no_member) {
  CoordinatorDriver driver(3);
  driver.request_all(change_of(HVL_ADD_PROCESS_SET, {0, 1}));
  driver.decide();
  for (int rank : {0, 1}) driver.request(rank, of_set(1, allreduce_of("x")));
  driver.decide();
  driver.ready(0, {2});
  CHECK_HAS(driver.ready(2, {2}), "no member");
  CHECK_EQ(driver.decide(), "");
}

}  // namespace
}  // namespace hvl
