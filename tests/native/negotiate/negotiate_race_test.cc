// Jobs of simulated ranks: see simulated_job.h. What must come out: every request completes exactly once, in the same
// order on all ranks, whatever the order of arrival and however small the cache; and what a rank runs is what it has
// asked for, also if ranks have joined.
#include "simulated_job.h"

using namespace hvl;

namespace {

std::vector<std::string> expected_of_round(int round, int num_names, int size) {
  std::vector<std::string> expected;
  for (int name = 0; name < num_names; ++name) {
    const bool error = name % 10 == 4 && round == 1 && size > 1;
    expected.push_back((error ? "error t" : "t") + std::to_string(name));
    if (name % 5 == 0) expected.push_back(unnamed_request(round, name).name);
  }
  std::sort(expected.begin(), expected.end());
  return expected;
}

void check_job(const CoordinatorOptions& options, unsigned seed) {
  constexpr int kNumNames = 30;
  DirectWiring wiring(options);
  SimulatedJob job(options.size, &wiring, seed);
  for (int round = 0; round < 4; ++round) {
    job.run_round(round, kNumNames);
    for (SimulatedRank& rank : job.ranks) CHECK(rank.completed == job.ranks[0].completed);
    std::vector<std::string> completed = job.ranks[0].completed;
    std::sort(completed.begin(), completed.end());
    CHECK(completed == expected_of_round(round, kNumNames, options.size));
    for (SimulatedRank& rank : job.ranks) rank.completed.clear();
  }
}

}  // namespace

TEST(jobs_in_which_ranks_join) {
  for (int size : {2, 3, 4, 16}) {
    for (int capacity : {1024, 3, 0}) {
      for (unsigned seed = 0; seed < 20; ++seed) {
        CoordinatorOptions options = options_of(size);
        options.cache_capacity = capacity;
        DirectWiring wiring(options);
        SimulatedJob job(options.size, &wiring, seed);
        for (int epoch = 0; epoch < 3; ++epoch) {
          job.run_until_all_have_joined(20);
          for (SimulatedRank& rank : job.ranks) {
            REQUIRE(!rank.completed.empty());
            CHECK_EQ(rank.completed.back(), "join");
            // Twenty requests and a join; the first rank made as many as it took.
            if (&rank != &job.ranks[0]) CHECK_EQ(rank.completed.size(), size_t{21});
            rank.completed.clear();
          }
        }
      }
    }
  }
}

TEST(jobs_with_a_large_cache) {
  for (int size : {1, 2, 3, 4, 16}) {
    for (unsigned seed = 0; seed < 10; ++seed) check_job(options_of(size), seed);
  }
}

TEST(jobs_with_a_small_cache) {
  for (int size : {1, 2, 3, 4, 16}) {
    for (int capacity : {0, 1, 5, 20}) {
      for (unsigned seed = 0; seed < 10; ++seed) {
        CoordinatorOptions options = options_of(size);
        options.cache_capacity = capacity;
        options.fusion_threshold = 100;
        check_job(options, seed);
      }
    }
  }
}
