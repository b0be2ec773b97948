// Jobs of several hosts from their beginning to their end, good or bad.
#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "hosts_job.h"
#include "teams.h"

namespace hvl {
namespace {

std::vector<int64_t> all_of(const Job& job) {
  std::vector<int64_t> ranks;
  for (int rank = 0; rank < job.size(); ++rank) ranks.push_back(rank);
  return ranks;
}

int num_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 4096; ++fd) count += fcntl(fd, F_GETFD) != -1 ? 1 : 0;
  return count;
}

TEST(jobs_begin_and_end_many_times_and_leave_no_descriptor) {
  const int before = num_descriptors();
  for (const std::vector<int>& hosts : kPlaces) {
    for (int round = 0; round < 5; ++round) {
      Job job(static_cast<int>(hosts.size()), on_hosts(hosts));
      if (round > 0) job.on_all([&](int rank) { check_sum(job, rank, 0, all_of(job), 1009, round); });
    }
    CHECK_EQ(num_descriptors(), before);
  }
}

TEST(one_rank_shuts_down_and_all_others_hear_of_it) {
  for (const std::vector<int>& hosts : kPlaces) {
    for (int leaver : {0, static_cast<int>(hosts.size()) - 1}) {
      Job job(static_cast<int>(hosts.size()), on_hosts(hosts));
      job.on_all([&](int rank) {
        check_sum(job, rank, 0, all_of(job), 10, 0);
        if (rank == leaver) return job.engine(rank).shut_down();
        Status status;
        float data = 1;
        char* address = reinterpret_cast<char*>(&data);
        const int64_t handle = job.enqueue(rank, make("late", HVL_ALLREDUCE, {{1}}), {address}, {address}, &status);
        if (status.ok()) status = job.wait(rank, handle);
        CHECK_EQ(status.code(), HVL_SHUT_DOWN);
        CHECK_HAS(status.message(), "rank " + std::to_string(leaver));
      });
    }
  }
}

// Several streams for each pair of ranks, over which chunks go in turn.
TEST(collectives_over_several_streams) {
  for (const std::vector<int>& hosts : kPlaces) {
    Wiring sockets;
    sockets.num_streams = 3;
    sockets.seals_data = hosts.size() % 2 == 0;
    for (const Wiring& wiring : {sockets, in_memory(3)}) {
      Job job(static_cast<int>(hosts.size()), on_hosts(hosts), 4096, 4, wiring);
      job.become_impatient(50 * kMicrosecond);
      job.on_all([&](int rank) {
        for (int round = 0; round < (check::is_brief ? 2 : 4); ++round) {
          for (size_t count : {1, 3001, 40009}) check_sum(job, rank, 0, all_of(job), count, round);
          std::vector<float> data(200003);
          for (size_t i = 0; i < data.size(); ++i) data[i] = value(rank, i);
          const int root = round % job.size();
          const auto operation = make("b" + std::to_string(root), HVL_BROADCAST, {{200003}}, HVL_SUM, root);
          CHECK_EQ(job.run(rank, operation, data.data()).message(), "");
          size_t num_wrong = 0;
          for (size_t i = 0; i < data.size(); ++i) num_wrong += data[i] == value(root, i) ? 0 : 1;
          CHECK_EQ(num_wrong, size_t{0});
        }
      });
    }
  }
}

// Small and large tensors by turns, from several threads of each rank, whose waits end after a few microseconds.
TEST(many_impatient_threads_of_each_rank) {
  constexpr int kThreads = 3;
  for (const std::vector<int>& hosts : {std::vector<int>{0, 1}, {0, 0, 1, 1}, {0, 0, 1, 2}}) {
    Job job(static_cast<int>(hosts.size()), on_hosts(hosts));
    job.become_impatient(30 * kMicrosecond);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads * job.size(); ++t) {
      threads.emplace_back([&job, rank = t % job.size(), name = "thread " + std::to_string(t / job.size())] {
        for (int round = 0; round < 30; ++round) {
          const int64_t count = round % 3 == 0 ? 30011 : 7;
          std::vector<float> data(static_cast<size_t>(count), static_cast<float>(rank + round));
          CHECK_EQ(job.run(rank, make(name + std::to_string(count), HVL_ALLREDUCE, {{count}}), data.data()).message(),
                   "");
          const float expected = static_cast<float>(job.size() * round + job.size() * (job.size() - 1) / 2);
          CHECK_EQ(std::count(data.begin(), data.end(), expected), count);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

// A rank that is cut off by its own engine, as soon as that has completed a tensor: it cannot tell anybody what it
// makes of that, as a process that is killed cannot.
struct CutOff {
  Job* job;
  int victim;
  std::atomic<uint64_t> at{0};

  hvl_callbacks callbacks() {
    hvl_callbacks all{};
    all.context = this;
    all.done = [](void* context, int32_t, const char*) {
      auto* cut = static_cast<CutOff*>(context);
      cut->at = now_ns();
      cut->job->cut_off(cut->victim);
    };
    return all;
  }
};

// One round: a small tensor and another one, which make one batch. `callbacks`: of the small one, if there are any.
Status move_once(Job& job, int rank, Kind kind, int64_t count, const hvl_callbacks& callbacks) {
  std::vector<float> small(4, 1.0F), other(static_cast<size_t>(count), 1.0F);
  char* address = reinterpret_cast<char*>(small.data());
  auto request = std::make_unique<PendingRequest>();
  request->operation = make("small", kind, {{4}}, HVL_SUM, 0);
  request->memory = Memory{address, address};
  request->callbacks = callbacks;
  int64_t first = 0;
  const Status accepted = job.engine(rank).enqueue(std::move(request), &first);
  if (!accepted.ok()) return accepted;
  address = reinterpret_cast<char*>(other.data());
  Status status;
  const int64_t second = job.enqueue(rank, make("other", kind, {{count}}, HVL_SUM, 0), {address}, {address}, &status);
  if (status.ok()) status = job.wait(rank, second);
  if (first == 0) return status;
  const Status of_first = job.wait(rank, first);
  return status.ok() ? of_first : status;
}

// The ranks of other hosts fail soon, with a reason that names the one that is cut off in the third round. Those of its
// own host cannot know who it was: here no process has ended.
void check_cut_off(const std::vector<int>& hosts, int victim, Kind kind, int64_t count, const Wiring& wiring) {
  EngineOptions options = on_hosts(hosts);
  options.overlap = false;  // so that both tensors make one batch
  Job job(static_cast<int>(hosts.size()), options, 4096, 4, wiring);
  CutOff cut{&job, victim};
  std::vector<uint64_t> failed_at(hosts.size());
  job.on_all([&](int rank) {
    Status status;
    for (int round = 0; status.ok(); ++round) {
      const bool is_last = rank == victim && round == 2;
      status = move_once(job, rank, kind, count, is_last ? cut.callbacks() : hvl_callbacks{});
    }
    failed_at[static_cast<size_t>(rank)] = now_ns();
    CHECK_EQ(status.code(), HVL_JOB_BROKEN);
    if (hosts[static_cast<size_t>(rank)] == hosts[static_cast<size_t>(victim)]) return;
    CHECK_HAS(status.message(), "rank " + std::to_string(victim) + " on host");
  });
  for (uint64_t time : failed_at) CHECK(time - cut.at < kSecond);
}

// At the root of the tree, with hosts below it, and at a leaf; and one that shares its host.
const std::vector<std::pair<std::vector<int>, int>> kVictims = {
    {{0, 1}, 1}, {{0, 1, 2, 3}, 0}, {{0, 1, 2, 3}, 1}, {{0, 0, 1, 2}, 3}, {{0, 0, 1, 1}, 2}, {{0, 1, 2, 3, 4, 5, 6}, 2},
};

void check_all_victims(Kind kind, int64_t count) {
  for (const auto& [hosts, victim] : kVictims) {
    for (const Wiring& wiring : {Wiring(), in_memory()}) check_cut_off(hosts, victim, kind, count, wiring);
  }
}

TEST(a_rank_that_is_lost_in_the_middle_of_large_allreduces) { check_all_victims(HVL_ALLREDUCE, 1 << 20); }
TEST(a_rank_that_is_lost_in_the_middle_of_small_allreduces) { check_all_victims(HVL_ALLREDUCE, 16); }
TEST(a_rank_that_is_lost_in_the_middle_of_broadcasts) { check_all_victims(HVL_BROADCAST, 1 << 18); }
TEST(a_rank_that_is_lost_in_the_middle_of_reduces) { check_all_victims(HVL_REDUCE, 1 << 18); }

}  // namespace
}  // namespace hvl
