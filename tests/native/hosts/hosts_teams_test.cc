// Process sets within and across hosts at the same time, and ranks that have joined.
#include <numeric>
#include <vector>

#include "check.h"
#include "hosts_job.h"
#include "teams.h"

namespace hvl {
namespace {

// Every pair of neighbours, those of even number, all but the first, each alone.
std::vector<std::vector<int64_t>> sets_of(int size) {
  std::vector<std::vector<int64_t>> sets(3);
  for (int rank = 0; rank < size; ++rank) {
    sets[0].push_back(rank);
    if (rank % 2 == 0) sets[1].push_back(rank);
    if (rank > 0) sets[2].push_back(rank);
    if (rank > 0 && size > 2) sets.push_back({rank - 1, rank});
  }
  sets.push_back({size - 1, 0});
  std::sort(sets.back().begin(), sets.back().end());
  return sets;
}

TEST(overlapping_and_disjoint_sets_at_the_same_time) {
  on_all_places([](Job& job) {
    std::vector<std::vector<int64_t>> sets;
    for (const auto& set : sets_of(job.size())) {
      if (std::find(sets.begin(), sets.end(), set) == sets.end()) sets.push_back(set);
    }
    job.on_all([&](int rank) {
      for (size_t set = 1; set < sets.size(); ++set) {
        CHECK_EQ(number_of(job, rank, add_of(sets[set])), static_cast<int64_t>(set));
      }
      for (int round = 0; round < 2; ++round) {
        for (size_t set = 0; set < sets.size(); ++set) {
          if (!contains(sets[set], rank)) continue;
          for (size_t count : {1, 5003}) {
            check_sum(job, rank, static_cast<int64_t>(set), sets[set], count + set, round);
          }
        }
      }
    });
  });
}

// Members of a set go on with it from a thread of their own, while all ranks work together.
TEST(a_set_beside_the_whole_job) {
  on_all_places([](Job& job) {
    std::vector<int64_t> members, all(static_cast<size_t>(job.size()));
    std::iota(all.begin(), all.end(), 0);
    for (int rank = 0; rank < job.size(); rank += 2) members.push_back(rank);
    job.on_all([&](int rank) { CHECK_EQ(number_of(job, rank, add_of(members)), 1); });
    job.on_all([&](int rank) {
      std::thread beside([&] {
        for (int round = 0; round < 8 && contains(members, rank); ++round) {
          check_sum(job, rank, 1, members, round % 2 == 0 ? 9001 : 10, round);
        }
      });
      for (int round = 0; round < 8; ++round) check_sum(job, rank, 0, all, round % 2 == 0 ? 20 : 7001, round);
      beside.join();
    });
  });
}

// Each rank runs as many rounds as its number, then joins.
TEST(ranks_that_have_joined_take_no_part) {
  on_all_places([](Job& job) {
    const int size = job.size();
    for (int epoch = 0; epoch < 2; ++epoch) {
      job.on_all([&](int rank) {
        for (int round = 0; round <= rank; ++round) {
          std::vector<int64_t> present(static_cast<size_t>(size - round));
          std::iota(present.begin(), present.end(), round);
          for (size_t count : {3, 5003}) check_sum(job, rank, 0, present, count, round);
          float mean = static_cast<float>(rank);
          CHECK_EQ(job.run(rank, make("mean", HVL_ALLREDUCE, {{1}}, HVL_AVERAGE), &mean).message(), "");
          CHECK_EQ(mean, static_cast<float>(round + size - 1) / 2);
        }
        CHECK_EQ(number_of(job, rank, make("join", HVL_JOIN, {})), size - 1);
      });
    }
  });
}

}  // namespace
}  // namespace hvl
