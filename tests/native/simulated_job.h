// Whole jobs of simulated ranks: each keeps what the log has told it, as an engine does, and messages and records are
// under way for as long as a seeded random order lets them.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "coordinator_driver.h"
#include "message_seeds.h"

using Random = std::mt19937;

// The request of one rank under a name in the `round`-th round; `wrong` names differ between the ranks in round 1.
inline hvl::Signature request_for(int name, int rank, int round) {
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

inline hvl::Signature unnamed_request(int round, int number) {
  return allreduce_of("noname." + std::to_string(round) + "." + std::to_string(number));
}

inline hvl::Signature join_request() {
  hvl::Signature signature = barrier_of("join");
  signature.kind = HVL_JOIN;
  return signature;
}

inline hvl::Signature change_request(hvl::Kind kind, const std::vector<int64_t>& arguments) {
  hvl::Signature signature = barrier_of(kind == HVL_ADD_PROCESS_SET ? "add" : "remove");
  signature.kind = kind;
  signature.arguments = arguments;
  return signature;
}

class SimulatedRank {
 public:
  SimulatedRank(int rank, int size) : rank_(rank) {
    for (int member = 0; member < size; ++member) process_sets_[0].push_back(member);
  }

  void enqueue(const hvl::Signature& signature) {
    if (!is_member(signature.process_set)) {
      completed.push_back("refused " + signature.name);
      return;
    }
    InFlight& request = in_flight_[key_of(signature)];
    request.signature = signature;
    announce(&request);
  }
  bool idle() const { return in_flight_.empty(); }
  bool has_in_flight(const hvl::Signature& signature) const { return in_flight_.count(key_of(signature)) > 0; }
  bool only_joins() const { return in_flight_.size() == 1 && has_in_flight(join_request()); }

  void read(const hvl::Record& record) {
    const bool is_absent = std::binary_search(record.absent.begin(), record.absent.end(), rank_);
    switch (record.type) {
      case hvl::Record::Type::kDefine:
        if (record.replaces != 0) forget(record.replaces, !is_absent);
        known_[record.id] = local(record);
        ids_[key_of(record.signature)] = record.id;
        break;
      case hvl::Record::Type::kExecute:
        for (hvl::TensorId id : record.ids) is_absent ? check_absent(id) : execute(id);
        break;
      case hvl::Record::Type::kError: {
        if (is_absent) return;
        const size_t erased = in_flight_.erase(key_of(record.signature));
        if (record.signature.process_set == 0) CHECK_EQ(erased, size_t{1});  // what is removed fails for all members
        if (erased > 0) completed.push_back("error " + record.signature.name);
        break;
      }
      case hvl::Record::Type::kEvict:
        for (hvl::TensorId id : record.ids) forget(id, false);
        break;
      case hvl::Record::Type::kShutdown: CHECK(false);
    }
  }

  std::deque<std::string> sent;        // not received by the coordinator, or who is between, yet
  std::vector<std::string> completed;  // in the order of the log
  size_t log_position = 0;

 private:
  struct InFlight {
    hvl::Signature signature;
    hvl::TensorId announced_as = 0;  // 0: in full
    int number = 0;                  // of the announcement
  };

  static std::string key_of(const hvl::Signature& signature) {
    return std::to_string(signature.process_set) + " " + signature.name;
  }

  bool is_member(int32_t process_set) const {
    const auto set = process_sets_.find(process_set);
    return set != process_sets_.end() && std::binary_search(set->second.begin(), set->second.end(), rank_);
  }

  void announce(InFlight* request) {
    const auto id = ids_.find(key_of(request->signature));
    hvl::Message message;
    if (id != ids_.end() && known_.at(id->second) == request->signature) {
      request->announced_as = id->second;
      message.ids = {id->second};
    } else {
      request->announced_as = 0;
      message.type = hvl::Message::Type::kRequest;
      message.signature = request->signature;
    }
    request->number = ++num_sent_;
    sent.push_back(encoded(message));
  }

  hvl::Signature local(const hvl::Record& record) const {
    hvl::Signature signature = record.signature;
    const size_t begin = record.varying_per_rank * static_cast<size_t>(rank_);
    hvl::put_varying(record.varying.data() + begin, record.varying_per_rank, &signature);
    return signature;
  }

  // Tensors that it had ready before it joined are executed with it.
  void check_absent(hvl::TensorId id) {
    const auto request = in_flight_.find(key_of(known_.at(id)));
    const auto join = in_flight_.find(key_of(join_request()));
    REQUIRE(join != in_flight_.end());
    if (request != in_flight_.end()) CHECK(request->second.number > join->second.number);
  }

  void execute(hvl::TensorId id) {
    REQUIRE(known_.count(id) == 1);
    const hvl::Signature signature = known_[id];
    if (!is_member(signature.process_set)) return;
    const auto request = in_flight_.find(key_of(signature));
    REQUIRE(request != in_flight_.end());
    CHECK(request->second.signature == signature);
    in_flight_.erase(request);
    completed.push_back(signature.name);
    if (signature.kind == HVL_ADD_PROCESS_SET) {
      process_sets_[hvl::next_process_set(process_sets_)].assign(signature.arguments.begin(),
                                                                 signature.arguments.end());
    }
    if (signature.kind == HVL_REMOVE_PROCESS_SET) process_sets_.erase(static_cast<int32_t>(signature.arguments[0]));
  }

  void forget(hvl::TensorId id, bool keeps_announcement) {
    const std::string key = key_of(known_.at(id));
    known_.erase(id);
    ids_.erase(key);
    const auto waiting = in_flight_.find(key);
    // The coordinator ignored or will ignore the id. What was sent in full stays good and must not be sent twice.
    if (waiting == in_flight_.end() || waiting->second.announced_as != id) return;
    if (keeps_announcement) waiting->second.announced_as = 0;
    if (!keeps_announcement) announce(&waiting->second);
  }

  int rank_;
  int num_sent_ = 0;
  std::map<int32_t, std::vector<int>> process_sets_;
  std::map<hvl::TensorId, hvl::Signature> known_;
  std::map<std::string, hvl::TensorId> ids_;
  std::map<std::string, InFlight> in_flight_;
};

// The network between the ranks: lets one message under way to or from a rank arrive at a time.
class Wiring {
 public:
  virtual ~Wiring() = default;
  virtual void move(SimulatedRank* rank, int number, Random* random) = 0;
};

inline void decide_into(hvl::Coordinator* coordinator, std::vector<hvl::Record>* log) {
  std::vector<hvl::Decision> decisions;
  coordinator->decide(&decisions);
  for (const hvl::Decision& decision : decisions) {
    const std::string bytes = encoded(decision.record);
    hvl::Record record;
    REQUIRE(decode(bytes.data(), bytes.size(), &record).ok());
    log->push_back(std::move(record));
  }
}

inline hvl::Message take_first(std::deque<std::string>* sent) {
  hvl::Message message;
  REQUIRE(decode(sent->front().data(), sent->front().size(), &message).ok());
  sent->pop_front();
  return message;
}

// Every rank talks to the coordinator.
class DirectWiring : public Wiring {
 public:
  explicit DirectWiring(const hvl::CoordinatorOptions& options) : coordinator_(options) {}

  void move(SimulatedRank* rank, int number, Random* random) override {
    switch ((*random)() % 3) {
      case 0:
        if (!rank->sent.empty()) {
          CHECK_EQ(coordinator_.on_message(number, take_first(&rank->sent), 0).message(), "");
        }
        return;
      case 1:
        if (rank->log_position < log_.size()) rank->read(log_[rank->log_position++]);
        return;
      default: return decide_into(&coordinator_, &log_);
    }
  }

 private:
  hvl::Coordinator coordinator_;
  std::vector<hvl::Record> log_;
};

class SimulatedJob {
 public:
  SimulatedJob(int size, Wiring* wiring, unsigned seed) : wiring_(wiring), random_(seed) {
    for (int rank = 0; rank < size; ++rank) ranks.emplace_back(rank, size);
    todo_.resize(ranks.size());
  }

  // All ranks enqueue the same names, each in an order of its own, and read the log until all are complete.
  void run_round(int round, int num_names) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      for (int name = 0; name < num_names; ++name) {
        todo_[rank].push_back(request_for(name, static_cast<int>(rank), round));
        if (name % 5 == 0) todo_[rank].push_back(unnamed_request(round, name));
      }
    }
    finish();
  }

  // All ranks but the first ask for the same tensors in different shapes, join sometime, and go on with another thread.
  // The first one asks until they are done, and joins last.
  void run_until_all_have_joined(int num_requests) {
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      todo_[rank] = {join_request()};
      for (int i = 0; i < num_requests; ++i) todo_[rank].push_back(random_request());
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
      step(rank);
    }
  }

  // Makes a set of some ranks, which use it until all ranks remove it, while one thread of each still does.
  void run_with_process_set(const std::vector<int64_t>& members, int num_names) {
    for (auto& todo : todo_) todo = {change_request(HVL_ADD_PROCESS_SET, members)};
    finish();
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      for (int name = 0; name < num_names; ++name) todo_[rank].push_back(request_for(name, 0, 0));
      todo_[rank].push_back(change_request(HVL_REMOVE_PROCESS_SET, {1}));
      if (!std::binary_search(members.begin(), members.end(), static_cast<int64_t>(rank))) continue;
      for (int name = 0; name < 2 * num_names; ++name) {
        todo_[rank].push_back(allreduce_of("s" + std::to_string(name % num_names)));
        todo_[rank].back().process_set = 1;
      }
    }
    finish();
  }

  std::vector<SimulatedRank> ranks;

 private:
  hvl::Signature random_request() {
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

  void finish() {
    int steps = 0;
    while (!finished()) {
      REQUIRE(++steps < 300000);
      step(random_() % ranks.size());
    }
  }

  void step(size_t number) {
    SimulatedRank& rank = ranks[number];
    std::vector<hvl::Signature>& todo = todo_[number];
    if (random_() % 4 != 0) return wiring_->move(&rank, static_cast<int>(number), &random_);
    if (todo.empty()) return;
    std::swap(todo.back(), todo[random_() % todo.size()]);  // in any order, so that no two wait for each other
    if (rank.has_in_flight(todo.back())) return;
    rank.enqueue(todo.back());
    todo.pop_back();
  }

  Wiring* wiring_;
  Random random_;
  std::vector<std::vector<hvl::Signature>> todo_;
};
