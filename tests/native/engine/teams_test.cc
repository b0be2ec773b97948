// Collectives of some of the ranks: process sets, ranks that have joined, and alltoall, over engines that are threads.

#include "teams.h"

#include <atomic>
#include <cstdlib>
#include <numeric>

#include "check.h"
#include "job_of_threads.h"

namespace hvl {
namespace {

TEST(overlapping_and_disjoint_sets_at_the_same_time) {
  const std::vector<std::vector<int64_t>> sets = {{0, 1, 2, 3}, {1, 3}, {0, 2}, {1, 2, 3}, {2}};
  for (bool overlap : {true, false}) {
    EngineOptions options;
    options.overlap = overlap;
    Job job(4, options);
    job.on_all([&](int rank) {
      for (size_t set = 1; set < sets.size(); ++set) {
        CHECK_EQ(number_of(job, rank, add_of(sets[set])), static_cast<int64_t>(set));
      }
      for (int round = 0; round < 20; ++round) {
        for (size_t set = 0; set < sets.size(); ++set) {
          if (!contains(sets[set], rank)) continue;
          for (size_t count : {1, 1009, 20011}) {
            check_sum(job, rank, static_cast<int64_t>(set), sets[set], count + set, round);
          }
        }
      }
    });
  }
}

TEST(a_set_that_is_removed_exists_no_more) {
  Job job(3);
  job.on_all([&](int rank) {
    CHECK_EQ(number_of(job, rank, add_of({0, 2})), 1);
    if (rank != 1) check_sum(job, rank, 1, {0, 2}, 100, 0);
    float data = 1;
    if (rank == 1) {
      const Status status = job.run(rank, on_set(1, make("x", HVL_ALLREDUCE, {{1}})), &data);
      CHECK_EQ(status.message(), "rank 1 is not a member of process set 1, for which it has enqueued 'x'");
    }
    auto removal = make("remove", HVL_REMOVE_PROCESS_SET, {});
    removal->signature.arguments = {1};
    CHECK_EQ(job.wait(rank, job.enqueue(rank, removal, {}, {})).message(), "");
    const Status status = job.run(rank, on_set(1, make("x", HVL_ALLREDUCE, {{1}})), &data);
    CHECK_EQ(status.message(), "'x' is for process set 1, which does not exist (any more)");
    CHECK_EQ(number_of(job, rank, add_of({1})), 1);  // the id is used again
    if (rank == 1) check_sum(job, rank, 1, {1}, 100, 0);
  });
}

// Each rank runs as many rounds as its number, then joins.
TEST(ranks_that_have_joined_take_no_part) {
  for (int size : {1, 2, 3, 4}) {
    Job job(size);
    for (int epoch = 0; epoch < 2; ++epoch) {
      job.on_all([&](int rank) {
        for (int round = 0; round <= rank; ++round) {
          std::vector<int64_t> present(static_cast<size_t>(size - round));
          std::iota(present.begin(), present.end(), round);
          check_sum(job, rank, 0, present, 5003, round);
          float most = -1.0F - static_cast<float>(rank);
          CHECK_EQ(job.run(rank, make("max", HVL_ALLREDUCE, {{1}}, HVL_MAX), &most).message(), "");
          CHECK_EQ(most, -1.0F - static_cast<float>(round));
          float mean = static_cast<float>(rank);
          CHECK_EQ(job.run(rank, make("mean", HVL_ALLREDUCE, {{1}}, HVL_AVERAGE), &mean).message(), "");
          CHECK_EQ(mean, static_cast<float>(round + size - 1) / 2);
        }
        CHECK_EQ(number_of(job, rank, make("join", HVL_JOIN, {})), size - 1);
      });
    }
  }
}

TEST(a_name_that_was_defined_while_a_rank_had_joined) {
  Job job(2);
  job.on_all([&](int rank) {
    float data = 1;
    if (rank == 1) CHECK_EQ(job.run(rank, make("x", HVL_ALLREDUCE, {{1}}), &data).message(), "");
    CHECK_EQ(data, 1.0F);
    number_of(job, rank, make("join", HVL_JOIN, {}));
    for (int round = 0; round < 2; ++round) {
      data = 1;
      CHECK_EQ(job.run(rank, make("x", HVL_ALLREDUCE, {{1}}), &data).message(), "");
      CHECK_EQ(data, 2.0F);
    }
  });
}

TEST(a_join_that_is_refused_on_all_ranks) {
  Job job(3);
  job.on_all([&](int rank) {
    for (int round = 0; round < 20; ++round) {
      float data = 1;
      const bool joins = rank == round % 3;
      const auto operation =
          make("x", joins ? HVL_JOIN : HVL_ALLREDUCE, joins ? std::vector<Shape>() : std::vector<Shape>{{1}});
      const Status status =
          joins ? job.wait(rank, job.enqueue(rank, operation, {}, {})) : job.run(rank, operation, &data);
      CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(HVL_MISMATCH));
      CHECK(status.message().find("Mismatched operations for 'x'") == 0);
      check_sum(job, rank, 0, {0, 1, 2}, 5, round);
    }
    number_of(job, rank, make("x", HVL_JOIN, {}));
    check_sum(job, rank, 0, {0, 1, 2}, 5, 0);
  });
}

int64_t rows_between(int from, int to, int round) { return (from * 3 + to * 2 + round) % 5 * (round == 2 ? 700 : 1); }

void check_alltoall(Job& job, int rank, int round) {
  const int size = job.size();
  auto operation = make("a2a", HVL_ALLTOALL, {});
  int64_t rows = 0;
  std::vector<float> sent;
  for (int to = 0; to < size; ++to) {
    const int64_t mine = rows_between(rank, to, round);
    operation->signature.arguments.push_back(mine);
    for (int64_t i = 0; i < 3 * mine; ++i) sent.push_back(static_cast<float>(100 * rank + 10 * to + i % 7));
    rows += mine;
  }
  sent.resize(sent.size() + 3);  // a row that no rank gets
  operation->signature.tensors = {TensorSignature{HVL_FLOAT32, {rows + 1, 3}}};
  operation->num_bytes = {operation->signature.num_bytes()};
  std::vector<hvl_output> outputs;
  const char* input = reinterpret_cast<const char*>(sent.data());
  CHECK_EQ(job.wait(rank, job.enqueue(rank, operation, {input}, {}), &outputs).message(), "");
  REQUIRE(outputs.size() == 2);
  const float* next = static_cast<const float*>(outputs[0].data);
  const int32_t* splits = static_cast<const int32_t*>(outputs[1].data);
  CHECK_EQ(outputs[1].shape[0], size);
  for (int from = 0; from < size; ++from) {
    CHECK_EQ(splits[from], rows_between(from, rank, round));
    for (int64_t i = 0; i < 3 * splits[from]; ++i) {
      CHECK_EQ(*next++, static_cast<float>(100 * from + 10 * rank + i % 7));
    }
  }
  CHECK_EQ((next - static_cast<const float*>(outputs[0].data)) * 4, outputs[0].num_bytes);
  for (hvl_output& output : outputs) free(output.data);
}

// Of two tensors, of which the second has no rows but for rank 0, which sends one to each rank.
void check_alltoall_of_group(Job& job, int rank) {
  const int size = job.size();
  const int64_t of_root = rank == 0 ? 1 : 0;
  auto operation = make("group", HVL_ALLTOALL, {{size}, {of_root * size, 2}});
  operation->signature.tensors[1].dtype = HVL_INT16;
  operation->num_bytes = {4 * size, 4 * of_root * size};
  for (int64_t split : {int64_t{1}, of_root}) {
    operation->signature.arguments.insert(operation->signature.arguments.end(), static_cast<size_t>(size), split);
  }
  std::vector<float> first;
  std::vector<int16_t> second;
  for (int to = 0; to < size; ++to) {
    first.push_back(static_cast<float>(10 * rank + to));
    second.insert(second.end(), {static_cast<int16_t>(to), -1});
  }
  std::vector<hvl_output> outputs;
  const std::vector<const char*> inputs = {reinterpret_cast<const char*>(first.data()),
                                           reinterpret_cast<const char*>(second.data())};
  CHECK_EQ(job.wait(rank, job.enqueue(rank, operation, inputs, {}), &outputs).message(), "");
  REQUIRE(outputs.size() == 4);
  for (int from = 0; from < size; ++from) {
    CHECK_EQ(static_cast<const float*>(outputs[0].data)[from], static_cast<float>(10 * from + rank));
    CHECK_EQ(static_cast<const int32_t*>(outputs[1].data)[from], 1);
    CHECK_EQ(static_cast<const int32_t*>(outputs[3].data)[from], from == 0 ? 1 : 0);
  }
  CHECK_EQ(outputs[2].dtype, HVL_INT16);
  CHECK_EQ(outputs[2].shape[0], 1);
  CHECK_EQ(static_cast<const int16_t*>(outputs[2].data)[0], rank);
  CHECK_EQ(static_cast<const int16_t*>(outputs[2].data)[1], -1);
  for (hvl_output& output : outputs) free(output.data);
}

TEST(alltoall_of_uneven_rows) {
  for (int size : {1, 2, 3, 4}) {
    Job job(size);
    job.on_all([&](int rank) {
      for (int round : {0, 1, 2, 2, 3}) check_alltoall(job, rank, round);
      for (int round = 0; round < 3; ++round) check_alltoall_of_group(job, rank);
    });
  }
}

// The last rank has joined with one thread and goes on with another, beside the others. Returns how many rounds
// succeeded.
int go_on_beside_join(int size, int capacity, const std::function<Status(Job&, int rank, int round)>& once) {
  EngineOptions options;
  options.cache_capacity = capacity;
  Job job(size, options);
  std::atomic<int> num_ok{0};
  const auto run = [&](int rank, int round) {
    const Status status = once(job, rank, round);
    CHECK(status.code() != HVL_JOB_BROKEN);
    if (status.ok()) ++num_ok;
  };
  std::atomic<bool> is_done{false};
  std::thread joins([&] { number_of(job, size - 1, make("join", HVL_JOIN, {})); });
  job.on_all([&](int rank) {
    if (rank == size - 1) {
      for (int round = 0; round < 200; ++round) run(rank, round);
      is_done = true;
      return;
    }
    for (int round = 0; !is_done; ++round) run(rank, round);
    number_of(job, rank, make("join", HVL_JOIN, {}));
  });
  joins.join();
  return num_ok;
}

TEST(errors_of_those_that_have_not_joined) {
  go_on_beside_join(2, 1024, [](Job& job, int rank, int) {
    float data = 1;
    return job.run(rank, make("b", HVL_BROADCAST, {{1}}, HVL_SUM, 1), &data);
  });
}

TEST(an_id_that_is_evicted_before_the_request_arrives) {
  go_on_beside_join(2, 0, [](Job& job, int rank, int) {
    float data = 1;
    return job.run(rank, make("x", HVL_ALLREDUCE, {{1}}), &data);
  });
}

TEST(a_shape_that_changes_while_a_rank_is_absent) {
  const int num_ok = go_on_beside_join(2, 1024, [](Job& job, int rank, int round) {
    const int64_t count = round / 3 % 2 == 0 ? 1 : 5003;  // of more chunks than the other
    std::vector<float> data(static_cast<size_t>(count), 1.0F);
    const Status status = job.run(rank, make("x", HVL_ALLREDUCE, {{count}}), data.data());
    const bool is_sum = (data.front() == 1 || data.front() == 2) && data.front() == data.back();
    CHECK(!status.ok() || is_sum);
    return status;
  });
  CHECK(num_ok > 0);
}

TEST(rows_that_change_while_a_rank_is_absent) {
  const int num_ok = go_on_beside_join(3, 1024, [](Job& job, int rank, int round) {
    const int64_t count = rank == 0 && round % 2 == 0 ? 5003 : 1 + rank;
    const std::vector<float> data(static_cast<size_t>(count), static_cast<float>(rank));
    std::vector<hvl_output> outputs;
    const auto operation = make("g", HVL_ALLGATHER, {{count}});
    const Status status =
        job.wait(rank, job.enqueue(rank, operation, {reinterpret_cast<const char*>(data.data())}, {}), &outputs);
    for (hvl_output& output : outputs) {
      const float* rows = static_cast<const float*>(output.data);
      CHECK(std::is_sorted(rows, rows + output.shape[0]));
      CHECK_EQ(std::count(rows, rows + output.shape[0], static_cast<float>(rank)), count);
      free(output.data);
    }
    return status;
  });
  CHECK(num_ok > 0);
}

}  // namespace
}  // namespace hvl
