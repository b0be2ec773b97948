// The schedule of a collective in which other hosts have a part, with a network that the test is. And whom a rank names
// that waits for it in vain.
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "check.h"
#include "collective/shm/chunk_pipeline.h"

namespace hvl {
namespace {

// A network on which all data of other hosts arrives at once, when the test says so.
struct Network {
  uint64_t num_sources = 0;
  uint64_t num_complete_chunks = 0;
  bool arrives = false;

  void add_source() { ++num_sources; }
  uint64_t num_complete() const { return num_complete_chunks; }
  const Sockets* sockets() const { return nullptr; }
  Status advance(bool* moved) {
    if (arrives && num_complete_chunks < num_sources) {
      num_complete_chunks = num_sources;
      *moved = true;
    }
    return Status();
  }
};

// A host whose ranks are all woken by the pipe of `poller`.
std::shared_ptr<HostMemory> woken_by(Poller* poller, int ranks) {
  int pipe[2];
  REQUIRE(pipe2(pipe, O_NONBLOCK | O_CLOEXEC) == 0);
  auto memory = HostMemory::anonymous(HostShape{ranks, 4096, 4});
  REQUIRE(memory->set_pipes(std::vector<int>(static_cast<size_t>(ranks), pipe[1])).ok());
  REQUIRE(poller->open(pipe[0]).ok());
  for (int end : pipe) close(end);
  return memory;
}

// It comes between the last look of a thread that has nothing to do and the look with which it makes sure that it may
// sleep.
TEST(what_comes_while_a_rank_falls_asleep_is_gone_on_with) {
  Poller poller;
  const std::shared_ptr<HostMemory> memory = woken_by(&poller, 1);
  Network network;
  WaiterOptions options;
  options.ranks = {0};
  options.poller = &poller;
  options.before_sleep = [&] { network.arrives = true; };
  Waiter waiter(memory, options);
  const std::function<bool()> never = [] { return false; };
  waiter.take_turn(WaitingParty::kWaitingThread, now_ns() + 10 * kSecond, &never);
  ChunkPipeline pipeline(memory, 0, &waiter);
  pipeline.begin(std::make_shared<Team>(std::vector<int>{0}, 0), 1);

  std::vector<uint64_t> spread, drained;
  const auto nothing = [](uint64_t) {};
  const Status status = pipeline.run(
      3, nothing, nothing, &network, [&](uint64_t chunk) { spread.push_back(chunk); },
      [&](uint64_t chunk) { drained.push_back(chunk); });
  CHECK_EQ(status.message(), "");
  CHECK(spread == (std::vector<uint64_t>{0, 1, 2}));
  CHECK(drained == (std::vector<uint64_t>{0, 1, 2}));
}

// The network of a rank whose peers send nothing.
struct SilentSockets : Sockets {
  void add_to(std::vector<pollfd>*) const override {}
  std::string awaited() const override { return "rank 2 on host b"; }
  Status check_answered() const override { return Status(); }
};

// The other hosts wait for the stopped rank, too.
TEST(a_stall_names_the_stopped_rank_of_this_host) {
  const pid_t child = fork();
  REQUIRE(child != -1);
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) pause();
  }
  REQUIRE(kill(child, SIGSTOP) == 0);
  REQUIRE(waitpid(child, nullptr, WUNTRACED) == child);

  Poller poller;
  const std::shared_ptr<HostMemory> memory = woken_by(&poller, 2);
  WaiterOptions options;
  options.ranks = {0, 1};
  options.pids = {getpid(), child};
  options.stall_shutdown = 0.05;
  options.poller = &poller;
  Waiter waiter(memory, options);
  const std::function<bool()> never = [] { return false; };
  waiter.take_turn(WaitingParty::kWaitingThread, now_ns() + 30 * kSecond, &never);
  const SilentSockets sockets;
  const Status status = waiter.wait(never, [](int) { return false; }, &sockets);
  CHECK_EQ(status.code(), HVL_JOB_BROKEN);
  CHECK(memory->broken_text().find("stalled: rank 1 (pid " + std::to_string(child) + ") did not") == 0);

  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace hvl
