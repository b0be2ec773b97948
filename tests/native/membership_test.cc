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

Signature of_set(int32_t process_set, Signature signature) {
  signature.process_set = process_set;
  return signature;
}

Signature join_of(int32_t process_set = 0) {
  Signature signature;
  signature.name = "join";
  signature.kind = HVL_JOIN;
  signature.process_set = process_set;
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
  CHECK(driver.decide().find("execute") != std::string::npos);
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
  CHECK(driver.last.back().record.text.find("ranks 0, 1 have [0], rank 2 has [1]") != std::string::npos);
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
  for (int rank : {0, 1}) driver.request(rank, broadcast_of("b", 2));
  CHECK_EQ(driver.decide(), "define 2 b; error b");
  CHECK_EQ(driver.last[1].record.text, "broadcast 'b' needs rank 2, which has joined.");
  for (int rank : {0, 1}) driver.request(rank, change_of(HVL_ADD_PROCESS_SET, {0}));
  driver.decide();
  CHECK(driver.last.back().record.text.find("needs rank 2, which has joined") != std::string::npos);
}

TEST(an_allgather_without_a_rank_has_no_rows_of_it) {
  CoordinatorDriver driver(2);
  driver.request(0, join_of());
  driver.request(1, allgather_of("g", {5, 2}));
  CHECK_EQ(driver.decide(), "define 2 g; execute 2");
  CHECK(driver.last[0].record.varying == std::vector<int64_t>({0, 5}));
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

TEST(ready_of_a_rank_that_is_no_member) {
  CoordinatorDriver driver(3);
  driver.request_all(change_of(HVL_ADD_PROCESS_SET, {0, 1}));
  driver.decide();
  for (int rank : {0, 1}) driver.request(rank, of_set(1, allreduce_of("x")));
  driver.decide();
  driver.ready(0, {2});
  CHECK(driver.ready(2, {2}).find("no member") != std::string::npos);
  CHECK_EQ(driver.decide(), "");
}

}  // namespace
}  // namespace hvl
