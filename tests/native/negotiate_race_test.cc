// Whole jobs of simulated ranks: each keeps what the log has told it, as an engine does, and messages and records are
// under way for as long as a seeded random order lets them. What must come out: every request completes exactly once,
// in the same order on all ranks, whatever the order of arrival and however small the cache; and what a rank runs is
// what it has asked for, also if ranks have joined.
#include <algorithm>
#include <deque>
#include <map>
#include <random>

#include "check.h"
#include "coordinator_driver.h"
#include "message_seeds.h"

using namespace hvl;

namespace {

using Random = std::mt19937;

// What one rank asks for under a name the `round`-th time; `wrong` names differ between the ranks in round 1.
Signature request_for(int name, int rank, int round) {
  const std::string text = "t" + std::to_string(name);
  switch (name % 10) {
    case 0: return broadcast_of(text, 0);
    case 1: return allgather_of(text, {(rank + round) % 3, 7});
    case 2: return allgather_of(text, {rank == 0 ? round : 2});  // one rank's rows change
    case 3: return barrier_of(text);
    case 4: return allreduce_of(text, {round == 1 && rank == 1 ? 5 : 4});  // disagree in round 1
    case 5: return allreduce_of(text, {1 + round});
    default: return allreduce_of(text, {name});
  }
}

Signature unnamed_request(int round, int number) {
  return allreduce_of("noname." + std::to_string(round) + "." + std::to_string(number));
}

Signature join_request() {
  Signature signature;
  signature.name = "join";
  signature.kind = HVL_JOIN;
  return signature;
}

class SimulatedRank {
 public:
  SimulatedRank(int rank, int size) : rank_(rank), size_(size) {}

  void enqueue(const Signature& signature) {
    InFlight& request = in_flight_[signature.name];
    request.signature = signature;
    announce(&request);
  }
  bool idle() const { return in_flight_.empty(); }
  bool has_in_flight(const std::string& name) const { return in_flight_.count(name) > 0; }
  bool only_joins() const { return in_flight_.size() == 1 && has_in_flight("join"); }

  void read(const Record& record) {
    const bool is_absent = std::count(record.absent.begin(), record.absent.end(), rank_) > 0;
    switch (record.type) {
      case Record::Type::kDefine:
        if (record.replaces != 0) forget(record.replaces, !is_absent);
        known_[record.id] = local(record);
        ids_[record.signature.name] = record.id;
        break;
      case Record::Type::kExecute:
        if (is_absent) return;
        for (TensorId id : record.ids) execute(id);
        break;
      case Record::Type::kError:
        if (is_absent) return;
        CHECK_EQ(in_flight_.erase(record.signature.name), 1);
        completed.push_back("error " + record.signature.name);
        break;
      case Record::Type::kEvict:
        for (TensorId id : record.ids) forget(id, false);
        break;
      case Record::Type::kShutdown: CHECK(false);
    }
  }

  std::deque<std::string> sent;        // not received by the coordinator yet
  std::vector<std::string> completed;  // in the order of the log
  size_t log_position = 0;

 private:
  struct InFlight {
    Signature signature;
    TensorId announced_as = 0;  // 0: in full
  };

  void announce(InFlight* request) {
    const auto id = ids_.find(request->signature.name);
    Message message;
    if (id != ids_.end() && known_.at(id->second) == request->signature) {
      request->announced_as = id->second;
      message.ids = {id->second};
    } else {
      request->announced_as = 0;
      message.type = Message::Type::kRequest;
      message.signature = request->signature;
    }
    sent.push_back(encoded(message));
  }

  Signature local(const Record& record) const {
    Signature signature = record.signature;
    const size_t begin = record.varying_per_rank * static_cast<size_t>(rank_);
    put_varying(record.varying.data() + begin, record.varying_per_rank, &signature);
    return signature;
  }

  void execute(TensorId id) {
    REQUIRE(known_.count(id) == 1);
    const Signature& signature = known_[id];
    REQUIRE(in_flight_.count(signature.name) == 1);
    CHECK(in_flight_[signature.name].signature == signature);
    in_flight_.erase(signature.name);
    completed.push_back(signature.name);
  }

  void forget(TensorId id, bool keeps_announcement) {
    const std::string name = known_.at(id).name;
    known_.erase(id);
    ids_.erase(name);
    const auto waiting = in_flight_.find(name);
    // The coordinator ignored or will ignore the id. What was sent in full stays good and must not be sent twice.
    if (waiting == in_flight_.end() || waiting->second.announced_as != id) return;
    if (keeps_announcement) waiting->second.announced_as = 0;
    if (!keeps_announcement) announce(&waiting->second);
  }

  int rank_, size_;
  std::map<TensorId, Signature> known_;
  std::map<std::string, TensorId> ids_;
  std::map<std::string, InFlight> in_flight_;
};

class SimulatedJob {
 public:
  SimulatedJob(const CoordinatorOptions& options, unsigned seed) : coordinator_(options), random_(seed) {
    for (int rank = 0; rank < options.size; ++rank) ranks.emplace_back(rank, options.size);
    todo_.resize(ranks.size());
  }

  // All ranks enqueue the same names, each in an order of its own, and read the log until all are complete.
  void run_round(int round, int num_names) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      for (int name = 0; name < num_names; ++name) {
        todo_[rank].push_back(request_for(name, static_cast<int>(rank), round));
        if (name % 5 == 0) todo_[rank].push_back(unnamed_request(round, name));
      }
      std::shuffle(todo_[rank].begin(), todo_[rank].end(), random_);
    }
    int steps = 0;
    while (!finished()) {
      REQUIRE(++steps < 1000000);
      step(random_() % ranks.size());
    }
  }

  // All ranks but the first ask for the same tensors in different shapes, join sometime, and go on with another thread.
  // The first one asks until they are done, and joins last.
  void run_until_all_have_joined(int num_requests) {
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      todo_[rank] = {join_request()};
      for (int i = 0; i < num_requests; ++i) todo_[rank].push_back(random_request());
      std::shuffle(todo_[rank].begin(), todo_[rank].end(), random_);
    }
    bool ends = false;
    int steps = 0;
    while (!ends || !finished()) {
      REQUIRE(++steps < 1000000);
      const size_t rank = random_() % ranks.size();
      if (rank == 0 && !ends && todo_[0].empty()) {
        const bool is_last = others_have_joined();
        ends = is_last && ranks[0].idle();
        if (ends || !is_last) todo_[0] = {ends ? join_request() : random_request()};
      }
      // Of what a rank has still to do, in any order, so that no two wait for each other.
      if (!todo_[rank].empty()) std::swap(todo_[rank].back(), todo_[rank][random_() % todo_[rank].size()]);
      const bool waits = !todo_[rank].empty() && ranks[rank].has_in_flight(todo_[rank].back().name);
      step(rank, waits);
    }
  }

  std::vector<SimulatedRank> ranks;

 private:
  Signature random_request() {
    const std::string name = "t" + std::to_string(random_() % 4);
    const int64_t extent = static_cast<int64_t>(random_() % 3 == 0);
    return name < "t2" ? allreduce_of(name, {1 + extent}) : allgather_of(name, {extent, 3});
  }

  bool others_have_joined() const {
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      if (!todo_[rank].empty() || !ranks[rank].only_joins()) return false;
    }
    return true;
  }

  bool finished() const {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (!todo_[rank].empty() || !ranks[rank].idle()) return false;
    }
    return true;
  }

  void step(size_t rank, bool waits = false) {
    SimulatedRank& one = ranks[rank];
    switch (random_() % 4) {
      case 0:
        if (waits || todo_[rank].empty()) return;
        one.enqueue(todo_[rank].back());
        return todo_[rank].pop_back();
      case 1: return receive(rank);
      case 2:
        if (one.log_position < log_.size()) one.read(log_[one.log_position++]);
        return;
      default: return decide();
    }
  }

  void receive(size_t rank) {
    std::deque<std::string>& sent = ranks[rank].sent;
    if (sent.empty()) return;
    Message message;
    REQUIRE(decode(sent.front().data(), sent.front().size(), &message).ok());
    sent.pop_front();
    const Status status = coordinator_.on_message(static_cast<int>(rank), message, 0);
    CHECK_EQ(status.message(), "");
  }

  void decide() {
    std::vector<Decision> decisions;
    coordinator_.decide(&decisions);
    for (const Decision& decision : decisions) {
      const std::string bytes = encoded(decision.record);
      Record record;
      REQUIRE(decode(bytes.data(), bytes.size(), &record).ok());
      log_.push_back(std::move(record));
    }
  }

  Coordinator coordinator_;
  Random random_;
  std::vector<std::vector<Signature>> todo_;
  std::vector<Record> log_;
};

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
  SimulatedJob job(options, seed);
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
        SimulatedJob job(options, seed);
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
