// The ranks that the coordinator wakes for the records that it writes into the log.
#include "control/shm_control.h"

#include <deque>

#include "check.h"
#include "coordinator_driver.h"

namespace hvl {
namespace {

constexpr int kSize = 4;

// The control planes of a host. The engines of ranks 1 to 3 sleep whenever the coordinator works.
class Host {
 public:
  Host() : memory_(HostMemory::anonymous(HostShape{kSize, 4096, 2})), coordinator_(memory_, options(), {}) {
    for (int rank = 1; rank < kSize; ++rank) workers_.emplace_back(memory_, rank);
  }

  void request(int rank, const Signature& signature) {
    Message message;
    message.type = Message::Type::kRequest;
    message.signature = signature;
    send(rank, message);
  }
  void ready(int rank, TensorId id) {
    Message message;
    message.ids = {id};
    send(rank, message);
  }

  void shut_down(int rank) {
    Message message;
    message.type = Message::Type::kShutdown;
    send(rank, message);
  }

  // The ranks that this has woken.
  std::vector<int> pump() {
    std::vector<uint32_t> seen;
    for (int rank = 0; rank < kSize; ++rank) {
      seen.push_back(doorbell(rank).notifications(WaitingParty::kEngineThread));
      doorbell(rank).arm(WaitingParty::kEngineThread, kWakeNews);
    }
    bool progressed = false;
    CHECK(coordinator_.pump(&progressed).ok());
    std::vector<int> woken;
    for (int rank = 0; rank < kSize; ++rank) {
      if (doorbell(rank).notifications(WaitingParty::kEngineThread) != seen[static_cast<size_t>(rank)])
        woken.push_back(rank);
    }
    return woken;
  }

  // The records that the rank finds in the log.
  std::string read(int rank) {
    ControlPlane& plane = rank == 0 ? static_cast<ControlPlane&>(coordinator_) : worker(rank);
    std::string text;
    Record record;
    for (bool found = true; found;) {
      CHECK(plane.next(&record, &found).ok());
      if (found) text += (text.empty() ? "" : "; ") + text_of(record);
    }
    return text;
  }

  // Makes a process set of ranks 0 and 2, and an allreduce on it that has id 2.
  void add_process_set() {
    Signature add;
    add.name = "add";
    add.kind = HVL_ADD_PROCESS_SET;
    add.arguments = {0, 2};
    for (int rank = 0; rank < kSize; ++rank) request(rank, add);
    CHECK(pump() == (std::vector<int>{1, 2, 3}));
    for (int rank = 0; rank < kSize; ++rank) read(rank);
    Signature sum = allreduce_of("x");
    sum.process_set = 1;
    for (int rank : {0, 2}) request(rank, sum);
    CHECK(pump() == std::vector<int>{2});
  }

 private:
  static CoordinatorHostOptions options() {
    CoordinatorHostOptions coordinator_host;
    coordinator_host.coordinator.size = kSize;
    return coordinator_host;
  }
  Doorbell& doorbell(int rank) { return memory_->rank(rank).doorbell; }
  ShmWorker& worker(int rank) { return workers_[static_cast<size_t>(rank) - 1]; }

  void send(int rank, const Message& message) {
    if (rank == 0) {
      CHECK(coordinator_.send(message).ok());
      return;
    }
    bool progressed = false;
    CHECK(worker(rank).send(message).ok());
    CHECK(worker(rank).pump(&progressed).ok());
  }

  std::shared_ptr<HostMemory> memory_;
  ShmCoordinator coordinator_;
  std::deque<ShmWorker> workers_;
};

TEST(a_collective_wakes_those_who_take_part) {
  Host host;
  host.add_process_set();
  for (int rank : {0, 2}) host.ready(rank, 2);
  CHECK(host.pump() == std::vector<int>{2});
  for (int rank : {1, 2, 3}) CHECK_EQ(host.read(rank), "define 2 x; execute 2; execute 2");

  Signature join = barrier_of("join");
  join.kind = HVL_JOIN;
  host.request(3, join);
  CHECK(host.pump().empty());
  for (int rank : {0, 1, 2}) host.request(rank, allreduce_of("all"));
  CHECK(host.pump() == (std::vector<int>{1, 2}));
  for (int rank : {0, 1, 2}) host.request(rank, join);
  CHECK(host.pump() == (std::vector<int>{1, 2, 3}));
  CHECK_EQ(host.read(3), "define 4 all; execute 4; define 3 join; execute 3");
}

TEST(what_may_concern_anybody_wakes_all) {
  Host host;
  host.add_process_set();
  Signature other = allreduce_of("x", {7});
  other.process_set = 1;
  host.request(0, other);
  host.ready(2, 2);
  CHECK(host.pump() == (std::vector<int>{1, 2, 3}));  // an error
  for (int rank : {0, 2}) host.ready(rank, 2);
  host.shut_down(2);
  CHECK(host.pump() == (std::vector<int>{1, 2, 3}));
  CHECK_EQ(host.read(1), "define 2 x; execute 2; error x; execute 2; shutdown");
}

// A rank that the records in the log do not concern must still free space there.
TEST(a_log_that_is_not_read_wakes_all) {
  constexpr size_t kCount = 15000;  // records of 21 bytes: more than the ring holds
  Host host;
  host.add_process_set();
  size_t num_wakes = 0;
  const auto run = [&](size_t count) {
    for (size_t i = 0; i < count; ++i) {
      for (int rank : {0, 2}) host.ready(rank, 2);
      const std::vector<int> woken = host.pump();
      num_wakes += woken.size() > 1 ? 1 : 0;
      for (int rank : {0, 2}) host.read(rank);
    }
  };
  run(kCount / 5);
  CHECK_EQ(num_wakes, size_t{0});
  run(kCount - kCount / 5);
  CHECK(num_wakes > 0);
  host.read(3);
  std::string text = host.read(1);
  host.pump();
  text += "; " + host.read(1);
  size_t num_executed = 0;
  for (size_t at = 0; (at = text.find("execute", at)) != std::string::npos; ++at) ++num_executed;
  CHECK_EQ(num_executed, 1 + kCount);
}

}  // namespace
}  // namespace hvl
