// One process that outlives many jobs: each time a rank in another process is killed, and the engines here end.
#include <fcntl.h>
#include <malloc.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "engine/engine.h"
#include "job_of_threads.h"

namespace hvl {
namespace {

constexpr int kSize = 3;

struct Rank {
  Rank(int rank, const std::shared_ptr<HostMemory>& memory, const std::vector<int32_t>& pids) {
    EngineOptions options;
    options.rank = options.local_rank = rank;
    options.size = kSize;
    options.hosts.assign(kSize, 0);
    options.local_pids = pids;
    engine = std::make_unique<Engine>(options, memory, &handles);
  }

  Status run(const std::shared_ptr<Operation>& operation, std::vector<float>* data) {
    auto request = std::make_unique<PendingRequest>();
    request->operation = operation;
    char* address = reinterpret_cast<char*>(data->data());
    request->memory = Memory{address, address};
    int64_t handle = 0;
    const Status status = engine->enqueue(std::move(request), &handle);
    if (!status.ok()) return status;
    engine->notify();
    CHECK_EQ(static_cast<int>(engine->wait(&handle, 1, now_ns() + kPatience)), static_cast<int>(HVL_OK));
    std::vector<hvl_output> none;
    return handles.consume(handle, &none);
  }

  // Batches of all sizes until something is wrong.
  Status run_on(int first) {
    for (int step = first;; ++step) {
      const int64_t count = 1 + step * 7919 % 60000;
      std::vector<float> data(static_cast<size_t>(count), 1.0f);
      const Status status = run(make("t" + std::to_string(step % 5), HVL_ALLREDUCE, {{count}}), &data);
      if (!status.ok()) return status;
      CHECK_EQ(data.front(), static_cast<float>(kSize));
      CHECK_EQ(data.back(), static_cast<float>(kSize));
    }
  }

  HandleTable handles;
  std::unique_ptr<Engine> engine;
};

struct Resources {
  int descriptors = 0;
  int mappings = 0;  // of shared memory
  int threads = 0;

  static Resources now() {
    Resources found;
    for (int fd = 0; fd < 4096; ++fd) found.descriptors += fcntl(fd, F_GETFD) != -1 ? 1 : 0;
    std::string line;
    std::ifstream maps("/proc/self/maps");
    while (std::getline(maps, line)) found.mappings += line.find("/dev/zero") != std::string::npos ? 1 : 0;
    std::ifstream status("/proc/self/status");
    while (std::getline(status, line)) {
      if (line.rfind("Threads:", 0) == 0) found.threads = std::stoi(line.substr(8));
    }
    return found;
  }
};

// In a job of three the victim is a process of its own, the others are engines of this one.
void break_a_job(int victim, std::chrono::microseconds delay) {
  const auto memory = HostMemory::anonymous(HostShape{kSize, 4096, 4});
  int told[2];
  REQUIRE(pipe(told) == 0);
  const pid_t parent = getpid();
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::vector<int32_t> pids(kSize, parent);
    pids[static_cast<size_t>(victim)] = getpid();
    Rank rank(victim, memory, pids);
    std::vector<float> data(10, 1.0f);
    if (rank.run(make("first", HVL_ALLREDUCE, {{10}}), &data).ok()) (void)!write(told[1], "!", 1);
    rank.run_on(0);
    _exit(1);
  }
  std::vector<int32_t> pids(kSize, parent);
  pids[static_cast<size_t>(victim)] = child;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    if (rank != victim) ranks.push_back(std::make_unique<Rank>(rank, memory, pids));
  }
  std::vector<uint64_t> failed_at(ranks.size());
  for (size_t index = 0; index < ranks.size(); ++index) {
    threads.emplace_back([&, index] {
      std::vector<float> data(10, 1.0f);
      CHECK_EQ(ranks[index]->run(make("first", HVL_ALLREDUCE, {{10}}), &data).message(), "");
      const Status status = ranks[index]->run_on(0);
      failed_at[index] = now_ns();
      CHECK_EQ(status.code(), HVL_JOB_BROKEN);
      CHECK_HAS(status.message(), "rank " + std::to_string(victim));
      CHECK_HAS(status.message(), "pid " + std::to_string(child));
    });
  }
  char byte = 0;
  CHECK_EQ(read(told[0], &byte, 1), ssize_t{1});
  std::this_thread::sleep_for(delay);  // the fault itself: somewhere in the middle
  const uint64_t killed_at = now_ns();
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  for (auto& thread : threads) thread.join();
  for (const uint64_t at : failed_at) CHECK(at - killed_at < 5 * kSecond);
  const uint64_t leaving_at = now_ns();
  ranks.clear();
  CHECK(now_ns() - leaving_at < 5 * kSecond);
  close(told[0]);
  close(told[1]);
}

// Returns the bytes of the heap that are in use.
size_t allocated_bytes() {
#if __GLIBC_PREREQ(2, 33)
  return mallinfo2().uordblks;
#else
  return static_cast<unsigned>(mallinfo().uordblks);
#endif
}

TEST(engines_end_after_a_rank_was_killed_and_others_begin_as_often_as_needed) {
  std::mt19937 random(6);
  Resources before;
  size_t heap_before = 0;
  for (int round = 0; round < 33; ++round) {
    if (round == 3) {  // what is allocated once is
      before = Resources::now();
      heap_before = allocated_bytes();
    }
    break_a_job(round % kSize, std::chrono::microseconds(random() % 3000));
  }
  Resources after = Resources::now();
  const uint64_t deadline = now_ns() + 10 * kSecond;
  while (after.threads != before.threads && now_ns() < deadline) {  // the system counts some a moment longer
    std::this_thread::yield();
    after = Resources::now();
  }
  CHECK_EQ(after.descriptors, before.descriptors);
  CHECK_EQ(after.mappings, before.mappings);
  CHECK_EQ(after.threads, before.threads);
  CHECK(allocated_bytes() < heap_before + 64 * 1024);  // an engine takes more than that; 0 where a sanitizer counts
}

}  // namespace
}  // namespace hvl
