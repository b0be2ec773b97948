// Rules that send some operations through a library's functions, and others through the engine's own transports.

#include <cstdlib>

#include "check.h"
#include "job_of_threads.h"
#include "library_of_threads.h"
#include "negotiate/routes.h"

namespace hvl {
namespace {

EngineOptions with_rules(LibraryOfThreads* library, std::vector<hvl_route> rules) {
  EngineOptions options;
  options.external = ExternalOptions{library->functions()};
  options.routes = Routes(std::move(rules));
  return options;
}

// Runs one operation of `count` elements for each rank, and checks sums and copies.
void run(Job& job, int rank, Kind kind, int64_t count, ReduceOp op = HVL_SUM) {
  const int64_t size = job.size();
  std::vector<float> data(static_cast<size_t>(kind == HVL_SCATTER ? count * size : count),
                          static_cast<float>(rank + 1));
  std::vector<float> made(data.size());
  auto operation = make("x", kind, {{count}}, op, has_root(kind) ? 0 : -1);
  if (kind == HVL_ALLTOALL) operation->signature.arguments.assign(static_cast<size_t>(size), count / size);
  std::vector<hvl_output> outputs;
  const std::vector<char*> given = {reinterpret_cast<char*>(made.data())};
  const int64_t handle = job.enqueue(rank, operation, {reinterpret_cast<const char*>(data.data())},
                                     allocates(kind) ? std::vector<char*>() : given);
  CHECK_EQ(job.wait(rank, handle, &outputs).message(), "");
  if (kind == HVL_ALLREDUCE && op == HVL_SUM) CHECK_EQ(made[0], static_cast<float>(size * (size + 1) / 2));
  if (kind == HVL_BROADCAST || kind == HVL_SCATTER) CHECK_EQ(made[0], 1.0F);
  for (hvl_output& output : outputs) free(output.data);
}

int calls_for(int size, const std::vector<hvl_route>& rules, const std::vector<int>& hosts,
              const std::function<void(Job&, int)>& work) {
  LibraryOfThreads library;
  EngineOptions options = with_rules(&library, rules);
  options.hosts = hosts;
  Job job(size, options);
  job.on_all([&](int rank) { work(job, rank); });
  return library.num_calls / size;
}

TEST(what_is_implemented_is_what_the_library_is_called_for) {
  for (int kind = 0; kind < kNumKinds; ++kind) {
    if (!has_tensors(static_cast<Kind>(kind))) continue;
    const auto work = [&](Job& job, int rank) { run(job, rank, static_cast<Kind>(kind), 6); };
    for (const std::vector<int>& hosts : {std::vector<int>{}, std::vector<int>{0, 0, 1}}) {
      CHECK(calls_for(3, {{HVL_CPU, kind, INT64_MAX, HVL_EXTERNAL}}, hosts, work) > 0);
      const int32_t other = kind == HVL_BROADCAST ? HVL_ALLREDUCE : HVL_BROADCAST;
      CHECK_EQ(calls_for(3, {{HVL_CPU, other, INT64_MAX, HVL_EXTERNAL}}, hosts, work), 0);
    }
  }
}

TEST(both_ways_in_turn) {
  const int half = check::is_brief ? 5 : 25;
  const auto work = [half](Job& job, int rank) {
    for (int round = 0; round < 2 * half; ++round) {
      run(job, rank, HVL_ALLREDUCE, round % 2 == 0 ? 15 : 16);
      run(job, rank, HVL_BROADCAST, 5000);
    }
  };
  for (const std::vector<int>& hosts : {std::vector<int>{}, std::vector<int>{0, 0, 1}}) {
    CHECK_EQ(calls_for(3, {{HVL_CPU, HVL_ALLREDUCE, 64, HVL_EXTERNAL}}, hosts, work), half);
  }
}

TEST(adasum_goes_where_allreduce_does) {
  const auto work = [](Job& job, int rank) { run(job, rank, HVL_ALLREDUCE, 6, HVL_ADASUM); };
  CHECK(calls_for(3, {{HVL_CPU, HVL_ALLREDUCE, INT64_MAX, HVL_EXTERNAL}}, {}, work) > 0);
  CHECK_EQ(calls_for(3, {{HVL_CPU, HVL_ALLREDUCE, 1, HVL_EXTERNAL}}, {}, work), 0);
}

TEST(without_rules_the_library_moves_everything) {
  const auto work = [](Job& job, int rank) { run(job, rank, HVL_ALLREDUCE, 6); };
  CHECK_EQ(calls_for(2, {{HVL_CUDA, HVL_ALLREDUCE, INT64_MAX, HVL_STAGING}}, {}, work), 1);
}

TEST(a_job_of_one_rank_needs_no_library) {
  EngineOptions options;
  options.routes = Routes({{HVL_CPU, HVL_ALLREDUCE, INT64_MAX, HVL_EXTERNAL}});
  Job job(1, options);
  run(job, 0, HVL_ALLREDUCE, 6);
}

TEST(memory_that_the_library_may_write_to_is_not_freed) {
  LibraryOfThreads library;
  library.failing = "allgatherv";
  {
    Job job(3, with_rules(&library, {{HVL_CPU, HVL_ALLGATHER, INT64_MAX, HVL_EXTERNAL}}));
    job.on_all([&](int rank) {
      run(job, rank, HVL_ALLREDUCE, 6);
      std::vector<float> data(5, 1.0F);
      CHECK_EQ(job.run(rank, make("y", HVL_ALLGATHER, {{5}}), data.data()).code(), HVL_JOB_BROKEN);
    });
  }
  CHECK_EQ(library.num_broken.load(), 3);
  library.write_late();
}

}  // namespace
}  // namespace hvl
