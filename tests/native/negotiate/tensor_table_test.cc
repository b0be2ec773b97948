#include "negotiate/tensor_table.h"

#include <deque>
#include <set>

#include "check.h"

using namespace hvl;

namespace {

TensorState* add_defined(TensorTable* table) {
  TensorState* tensor = table->add();
  tensor->defined = true;
  table->touch(tensor);
  return tensor;
}

std::vector<TensorId> by_last_use(TensorTable* table) {
  std::vector<TensorId> ids;
  for (TensorState* tensor = table->least_recent(); tensor != nullptr; tensor = table->more_recent(*tensor)) {
    ids.push_back(tensor->id);
  }
  return ids;
}

}  // namespace

TEST(an_id_stands_for_its_tensor_until_removed) {
  TensorTable table(2);
  CHECK(table.find(kNoId) == nullptr);
  CHECK(!table.was_given(1));
  TensorState* tensor = add_defined(&table);
  CHECK_EQ(tensor->id, 1);
  CHECK(table.find(1) == tensor);
  CHECK(table.find(1 + 256) == nullptr);  // the same place
  table.remove(tensor);
  CHECK(table.find(1) == nullptr);
  CHECK(table.was_given(1));
  CHECK(!table.was_given(kNoId));
}

TEST(growing_keeps_everything) {
  constexpr TensorId kCount = 5000;
  TensorTable table(70);
  for (TensorId id = 1; id <= kCount; ++id) {
    TensorState* tensor = add_defined(&table);
    REQUIRE(tensor->id == id);
    table.details(*tensor).signature.name = std::to_string(id);
    CHECK(table.add_ready(tensor, static_cast<int>(id % 70)));
  }
  for (TensorId id = 1; id <= kCount; ++id) {
    TensorState* tensor = table.find(id);
    REQUIRE(tensor != nullptr);
    CHECK_EQ(table.details(*tensor).signature.name, std::to_string(id));
    for (int rank = 0; rank < 70; ++rank) CHECK_EQ(table.is_ready(*tensor, rank), rank == static_cast<int>(id % 70));
  }
  CHECK_EQ(by_last_use(&table).size(), kCount);
  CHECK_EQ(table.num_defined(), kCount);
}

TEST(memory_follows_the_known_tensors) {
  TensorTable table(2);
  const TensorId old = add_defined(&table)->id;  // lives through all of it
  std::deque<TensorId> living;
  std::set<TensorId> seen;
  for (int i = 0; i < 100000; ++i) {
    living.push_back(add_defined(&table)->id);
    CHECK(seen.insert(living.back()).second);
    if (living.size() <= 100) continue;
    table.remove(table.find(living.front()));
    living.pop_front();
  }
  CHECK_EQ(table.num_places(), 256);
  REQUIRE(table.find(old) != nullptr);
  table.remove(table.find(old));
  for (TensorId id : living) table.remove(table.find(id));
  CHECK_EQ(table.num_defined(), 0);
  CHECK(table.least_recent() == nullptr);
}

TEST(the_counter_goes_round_without_taking_a_living_id) {
  TensorTable table(2, 0xfffffff0);
  const TensorId kept = add_defined(&table)->id;
  for (int i = 0; i < 100; ++i) {
    TensorState* tensor = table.add();
    CHECK(tensor->id != kNoId);
    CHECK(tensor->id != kept);
    table.remove(tensor);
  }
  CHECK(table.find(kept) != nullptr);
  CHECK(table.was_given(1));
  CHECK(table.was_given(0xf0000000));  // may have been, in the last round
}

TEST(order_of_last_use) {
  TensorTable table(2);
  for (int i = 0; i < 4; ++i) add_defined(&table);
  CHECK(by_last_use(&table) == std::vector<TensorId>({1, 2, 3, 4}));
  table.touch(table.find(4));
  table.touch(table.find(1));
  table.touch(table.find(3));
  CHECK(by_last_use(&table) == std::vector<TensorId>({2, 4, 1, 3}));
  table.remove(table.find(4));
  table.remove(table.find(2));
  table.remove(table.find(3));
  CHECK(by_last_use(&table) == std::vector<TensorId>({1}));
  table.touch(table.find(1));
  CHECK(by_last_use(&table) == std::vector<TensorId>({1}));
  CHECK_EQ(table.num_defined(), 1);
}

TEST(a_rank_is_ready_once) {
  TensorTable table(65);
  TensorState* tensor = table.add();
  CHECK(table.add_ready(tensor, 64));
  CHECK(!table.add_ready(tensor, 64));
  CHECK(table.add_ready(tensor, 0));
  CHECK_EQ(tensor->num_ready, 2);
  table.clear_ready(tensor);
  CHECK_EQ(tensor->num_ready, 0);
  CHECK(table.add_ready(tensor, 64));
}

TEST(many_ranks_are_ready_at_once) {
  for (int num_ranks : {64, 65, 200}) {
    for (int first = 0; first < num_ranks; ++first) {
      for (int last : {first, num_ranks - 1}) {
        TensorTable table(num_ranks);
        TensorState* tensor = table.add();
        RankSet ranks;
        ranks.add(RankRange{first, last});
        CHECK_EQ(table.add_ready(tensor, ranks), -1);
        CHECK_EQ(tensor->num_ready, last - first + 1);
        for (int rank = 0; rank < num_ranks; ++rank) {
          CHECK_EQ(table.is_ready(*tensor, rank), first <= rank && rank <= last);
        }
        CHECK_EQ(table.add_ready(tensor, RankSet(last)), last);
        CHECK_EQ(table.add_ready(tensor, ranks), first);
      }
    }
  }
}
