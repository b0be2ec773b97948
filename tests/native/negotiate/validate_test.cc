#include "negotiate/validate.h"

#include <algorithm>
#include <limits>
#include <random>

#include "check.h"
#include "coordinator_driver.h"
#include "negotiate/rank_set.h"

using namespace hvl;

namespace {

// The only record decided when rank r asks for requests[r], which must not depend on the order of arrival.
Record decide_only(const std::vector<Signature>& requests) {
  std::vector<size_t> order(requests.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::mt19937 random(1);
  Record record;
  for (int shuffle = 0; shuffle < 4; ++shuffle) {
    CoordinatorDriver driver(static_cast<int>(requests.size()));
    for (size_t rank : order) CHECK_EQ(driver.request(static_cast<int>(rank), requests[rank]), "");
    driver.decide();
    REQUIRE(driver.last.size() == 1);
    CHECK(shuffle == 0 || driver.last[0].record.text == record.text);
    record = driver.last[0].record;
    std::shuffle(order.begin(), order.end(), random);
  }
  CHECK(record.type == Record::Type::kError);
  CHECK_EQ(record.signature.name, requests[0].name);
  CHECK_EQ(record.signature.process_set, requests[0].process_set);
  return record;
}

std::string mismatch(const std::vector<Signature>& requests) {
  const Record record = decide_only(requests);
  CHECK_EQ(record.status, HVL_MISMATCH);
  return record.text;
}

std::string invalid(const std::vector<Signature>& requests) {
  const Record record = decide_only(requests);
  CHECK_EQ(record.status, HVL_INVALID_ARGUMENT);
  return record.text;
}

Signature with(Signature signature, void (*change)(Signature*)) {
  change(&signature);
  return signature;
}

}  // namespace

TEST(lists_of_ranks) {
  CHECK_EQ(text_of_ranks({7}), "rank 7");
  CHECK_EQ(text_of_ranks({0, 1}), "ranks 0, 1");
  CHECK_EQ(text_of_ranks({0, 1, 2, 3, 4, 5, 6, 7}), "ranks 0, 1, 2, 3, 4, 5, 6, 7");
  CHECK_EQ(text_of_ranks({0, 1, 2, 3, 4, 5, 6, 7, 8}), "ranks 0-8");
  CHECK_EQ(text_of_ranks({0, 1, 2, 3, 4, 5, 6, 9, 12}), "ranks 0-6, 9, 12");
  CHECK_EQ(text_of_ranks({0, 2, 4, 6, 8, 10, 12, 14, 16}), "ranks 0, 2, 4, 6 and 5 more");
}

TEST(shapes) {
  const Signature a = allreduce_of("grad.3", {17, 17});
  const Signature b = allreduce_of("grad.3", {17, 16});
  CHECK_EQ(mismatch({a, a, b}),
           "Mismatched shapes for allreduce 'grad.3': ranks 0, 1 have [17, 17], rank 2 has [17, 16].");
  CHECK_EQ(mismatch({a, b, b}),
           "Mismatched shapes for allreduce 'grad.3': ranks 1, 2 have [17, 16], rank 0 has [17, 17].");
  CHECK_EQ(mismatch({b, a}), "Mismatched shapes for allreduce 'grad.3': rank 0 has [17, 16], rank 1 has [17, 17].");
  CHECK_EQ(mismatch({a, allreduce_of("grad.3", {})}),
           "Mismatched shapes for allreduce 'grad.3': rank 0 has [17, 17], rank 1 has [].");
}

TEST(many_ranks_and_many_values_stay_short) {
  std::vector<Signature> requests(16, allreduce_of("x", {1}));
  requests[9] = requests[4] = allreduce_of("x", {2});
  CHECK_EQ(mismatch(requests),
           "Mismatched shapes for allreduce 'x': ranks 0-3, 5-8, 10-15 have [1], ranks 4, 9 have [2].");
  for (int rank = 0; rank < 16; ++rank) requests[static_cast<size_t>(rank)] = allreduce_of("x", {rank});
  CHECK_EQ(mismatch(requests),
           "Mismatched shapes for allreduce 'x': rank 0 has [0], rank 1 has [1], rank 2 has [2], "
           "rank 3 has [3], 12 other ranks have other values.");
  requests.resize(5);
  CHECK_EQ(mismatch(requests),
           "Mismatched shapes for allreduce 'x': rank 0 has [0], rank 1 has [1], rank 2 has [2], "
           "rank 3 has [3], 1 other rank has another value.");
}

TEST(everything_else_of_an_allreduce) {
  const Signature a = allreduce_of("x");
  CHECK_EQ(mismatch({a, with(a, [](Signature* s) { s->tensors[0].dtype = HVL_BFLOAT16; })}),
           "Mismatched data types for allreduce 'x': rank 0 has float32, rank 1 has bfloat16.");
  CHECK_EQ(mismatch({a, with(a, [](Signature* s) { s->op = HVL_AVERAGE; })}),
           "Mismatched reduction operations for allreduce 'x': rank 0 has Sum, rank 1 has Average.");
  CHECK_EQ(mismatch({a, with(a, [](Signature* s) { s->prescale = 0.1; })}),
           "Mismatched prescale factors for allreduce 'x': rank 0 has 1, rank 1 has 0.1.");
  CHECK_EQ(mismatch({a, with(a, [](Signature* s) { s->postscale = 1 + std::numeric_limits<double>::epsilon(); })}),
           "Mismatched postscale factors for allreduce 'x': rank 0 has 1, rank 1 has 1.0000000000000002.");
  CHECK_EQ(mismatch({a, with(a, [](Signature* s) { s->device = HVL_CUDA; })}),
           "Mismatched devices for allreduce 'x': rank 0 has CPU, rank 1 has GPU.");
  const Signature matrix = allreduce_of("x", {2, 3});
  CHECK_EQ(mismatch({matrix, with(matrix, [](Signature* s) { s->arguments = {HVL_COLUMN_MAJOR}; })}),
           "Mismatched memory formats for allreduce 'x': rank 0 has row-major, rank 1 has column-major.");
  const Signature images = allreduce_of("x", {2, 3, 4, 5});
  CHECK_EQ(mismatch({images, with(images, [](Signature* s) { s->arguments = {HVL_CHANNELS_LAST}; }), images}),
           "Mismatched memory formats for allreduce 'x': ranks 0, 2 have row-major, rank 1 has channels_last.");
}

TEST(kinds) {
  CHECK_EQ(mismatch({allreduce_of("x"), broadcast_of("x", 0), allreduce_of("x")}),
           "Mismatched operations for 'x': ranks 0, 2 have allreduce, rank 1 has broadcast.");
  CHECK_EQ(mismatch({barrier_of("x"), allgather_of("x", {1})}),
           "Mismatched operations for 'x': rank 0 has barrier, rank 1 has allgather.");
}

TEST(groups_name_the_tensor) {
  Signature a = allreduce_of("g");
  a.tensors = {{HVL_FLOAT32, {2}}, {HVL_FLOAT32, {3}}, {HVL_FLOAT16, {4}}};
  CHECK_EQ(mismatch({a, with(a, [](Signature* s) { s->tensors[1].shape = {3, 1}; })}),
           "Mismatched shapes for allreduce 'g', tensor with index 1 of the group: rank 0 has [3], rank 1 has [3, 1].");
  CHECK_EQ(mismatch({a, with(a, [](Signature* s) { s->tensors[2].dtype = HVL_INT64; })}),
           "Mismatched data types for allreduce 'g', tensor with index 2 of the group: rank 0 has float16, "
           "rank 1 has int64.");
  CHECK_EQ(mismatch({a, with(a, [](Signature* s) { s->tensors.pop_back(); })}),
           "Mismatched numbers of tensors for allreduce 'g': rank 0 has 3, rank 1 has 2.");
  a.tensors[1].shape = {3, 3, 3};
  CHECK_EQ(mismatch({with(a, [](Signature* s) { s->arguments = {0, HVL_CHANNELS_LAST, 0}; }), a}),
           "Mismatched memory formats for allreduce 'g', tensor with index 1 of the group: rank 0 has channels_last, "
           "rank 1 has row-major.");
}

TEST(allgathers) {
  const Signature a = allgather_of("x", {5, 17});
  CHECK_EQ(
      mismatch({a, a, allgather_of("x", {6, 16})}),
      "Mismatched dimensions other than the first for allgather 'x': ranks 0, 1 have [*, 17], rank 2 has [*, 16].");
  CHECK_EQ(mismatch({a, allgather_of("x", {5})}),
           "Mismatched numbers of dimensions for allgather 'x': rank 0 has 2, rank 1 has 1.");
  CHECK_EQ(mismatch({a, allgather_of("x", {})}),
           "Mismatched numbers of dimensions for allgather 'x': rank 0 has 2, rank 1 has 0.");
  CHECK_EQ(mismatch({a, with(a, [](Signature* s) { s->tensors[0].dtype = HVL_INT8; })}),
           "Mismatched data types for allgather 'x': rank 0 has float32, rank 1 has int8.");
  CHECK_EQ(invalid({allgather_of("x", {}), allgather_of("x", {})}),
           "allgather needs at least one dimension: allgather 'x' has a scalar tensor.");
  const int64_t half = int64_t{1} << 60;  // elements of 4 bytes
  CHECK_EQ(invalid({allgather_of("x", {half}), allgather_of("x", {half})}),
           "The output of allgather 'x' is too large.");
}

TEST(alltoalls) {
  Signature a = with(allgather_of("x", {5, 17}), [](Signature* s) { s->kind = HVL_ALLTOALL; });
  a.tensors.push_back({HVL_FLOAT16, {3}});
  a.arguments = {2, 3, 0, 3};  // of the first tensor to each rank, of the second tensor to each rank
  CHECK_EQ(mismatch({a, with(a, [](Signature* s) { s->tensors[1].shape = {3, 1}; })}),
           "Mismatched numbers of dimensions for alltoall 'x', tensor with index 1 of the group: rank 0 has 1, "
           "rank 1 has 2.");
  CHECK_EQ(mismatch({a, with(a,
                             [](Signature* s) {
                               s->tensors.pop_back();
                               s->arguments = {2, 3};
                             })}),
           "Mismatched numbers of tensors for alltoall 'x': rank 0 has 2, rank 1 has 1.");
  CHECK_EQ(invalid({a, with(a, [](Signature* s) { s->arguments = {2, 3, 0, 0, 0, 3}; })}),
           "alltoall 'x' on rank 1 has 3 splits for 2 ranks.");
}

TEST(roots) {
  for (Kind kind : {HVL_BROADCAST, HVL_GATHER, HVL_SCATTER, HVL_REDUCE}) {
    const std::string title = name_of(kind) + std::string(" 'x'");
    CHECK_EQ(mismatch({rooted_of(kind, "x", 0), rooted_of(kind, "x", 1)}),
             "Mismatched root ranks for " + title + ": rank 0 has 0, rank 1 has 1.");
    CHECK_EQ(invalid({rooted_of(kind, "x", 2), rooted_of(kind, "x", 2)}),
             "Root rank 2 of " + title + " is not one of its ranks, ranks 0, 1.");
    CHECK_EQ(invalid({rooted_of(kind, "x", -1)}), "Root rank -1 of " + title + " is not one of its ranks, rank 0.");
    CHECK_EQ(mismatch({rooted_of(kind, "x", 0),
                       with(rooted_of(kind, "x", 0), [](Signature* s) { s->tensors[0].dtype = HVL_INT8; })}),
             "Mismatched data types for " + title + ": rank 0 has float32, rank 1 has int8.");
  }
  CHECK_EQ(mismatch({broadcast_of("x", 0), rooted_of(HVL_SCATTER, "x", 0), rooted_of(HVL_REDUCE, "x", 0)}),
           "Mismatched operations for 'x': rank 0 has broadcast, rank 1 has scatter, rank 2 has reduce.");
}

TEST(the_shapes_of_what_has_a_root) {
  for (Kind kind : {HVL_SCATTER, HVL_REDUCE}) {
    CHECK_EQ(mismatch({rooted_of(kind, "x", 0, {5}), rooted_of(kind, "x", 0, {6})}),
             std::string("Mismatched shapes for ") + name_of(kind) + " 'x': rank 0 has [5], rank 1 has [6].");
  }
  const Signature reduce = rooted_of(HVL_REDUCE, "x", 0);
  CHECK_EQ(mismatch({reduce, with(reduce, [](Signature* s) { s->op = HVL_MAX; })}),
           "Mismatched reduction operations for reduce 'x': rank 0 has Sum, rank 1 has Max.");
  CHECK_EQ(mismatch({rooted_of(HVL_GATHER, "x", 1, {5, 17}), rooted_of(HVL_GATHER, "x", 1, {6, 16})}),
           "Mismatched dimensions other than the first for gather 'x': rank 0 has [*, 17], rank 1 has [*, 16].");
  CHECK_EQ(invalid({rooted_of(HVL_GATHER, "x", 0, {}), rooted_of(HVL_GATHER, "x", 0, {})}),
           "gather needs at least one dimension: gather 'x' has a scalar tensor.");
  const int64_t half = int64_t{1} << 60;  // elements of 4 bytes
  CHECK_EQ(invalid({rooted_of(HVL_GATHER, "x", 0, {half}), rooted_of(HVL_GATHER, "x", 0, {half})}),
           "The output of gather 'x' is too large.");
}

TEST(unknown_process_sets_fail_at_once) {
  CoordinatorDriver driver(2);
  Signature signature = allreduce_of("x");
  signature.process_set = 3;
  CHECK_EQ(driver.request(1, signature), "");
  CHECK_EQ(driver.decide(), "error x");
  CHECK_EQ(driver.last[0].record.signature.process_set, 3);
  CHECK_EQ(driver.last[0].record.status, HVL_INVALID_ARGUMENT);
  CHECK_EQ(driver.last[0].record.text, "There is no process set 3, which rank 1 wants for 'x'.");
  CHECK(driver.coordinator.pending().empty());
  CHECK_EQ(driver.decide(), "");
}

TEST(what_has_no_meaning_for_a_kind_may_differ) {
  CoordinatorDriver driver(3);
  for (int rank : {2, 1, 0}) {
    Signature signature = broadcast_of("x", 1);
    signature.prescale = rank + 2;
    signature.op = HVL_MAX;
    driver.request(rank, signature);
  }
  CHECK_EQ(driver.decide(), "define 1 x; execute 1");
  CHECK_EQ(driver.last[0].record.signature.prescale, 2.0);  // rank 0's, in any order of arrival
}

TEST(an_error_concerns_one_tensor_and_keeps_the_order) {
  CoordinatorDriver driver(2);
  driver.request_all(allreduce_of("a"));
  driver.request(0, allreduce_of("b", {1}));
  driver.request(1, allreduce_of("b", {2}));
  driver.request_all(allreduce_of("c"));
  CHECK_EQ(driver.decide(), "define 1 a; execute 1; error b; define 3 c; execute 3");
  CHECK_EQ(driver.last[2].reason.text(), "not executed on 2 ranks");
  driver.request_all(allreduce_of("b"));  // the name is free again
  CHECK_EQ(driver.decide(), "define 4 b; execute 4");
}
