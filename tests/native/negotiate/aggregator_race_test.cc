// Jobs of simulated ranks whose messages come through a tree of aggregators: the same must come out as where every rank
// talks to the coordinator, however long messages and records are under way.
#include <memory>
#include <set>

#include "negotiate/aggregator.h"
#include "simulated_job.h"

using namespace hvl;

namespace {

constexpr uint64_t kForEver = uint64_t{1} << 62;
constexpr int kNumNames = 12;

struct Tree {
  std::vector<int> hosts;  // how many ranks each has
  int fan_out;

  int size() const {
    int size = 0;
    for (int ranks : hosts) size += ranks;
    return size;
  }
};

class TreeWiring : public Wiring {
 public:
  TreeWiring(const CoordinatorOptions& options, const Tree& tree, uint64_t patience)
      : coordinator_(options), fan_out_(static_cast<size_t>(tree.fan_out)), hosts_(tree.hosts.size()) {
    int rank = 0;
    for (size_t h = 0; h < hosts_.size(); ++h) {
      for (int last = rank + tree.hosts[h]; rank < last; ++rank) {
        host_of_.push_back(h);
        for (size_t above = h; above > 0; above = (above - 1) / fan_out_) hosts_[above].below.add(rank);
      }
    }
    for (Host& host : hosts_) {
      AggregatorOptions aggregator;
      aggregator.ranks = host.below;
      aggregator.patience = patience;
      host.aggregator = std::make_unique<Aggregator>(aggregator);
    }
  }

  void move(SimulatedRank* rank, int number, Random* random) override {
    const size_t h = host_of_[static_cast<size_t>(number)];
    Host& host = hosts_[h];
    now_ += (*random)() % (4 * kMillisecond);
    switch ((*random)() % 6) {
      case 0: return send(rank, number, (*random)() % kMillisecond);
      case 1:
        if (rank->log_position < read_by(h)) rank->read(log_[rank->log_position++]);
        return;
      case 2:
        if (h > 0 && host.read < read_by((h - 1) / fan_out_)) host.aggregator->observe(log_[host.read++]);
        return;
      case 3: return receive(h, h * fan_out_ + 1 + (*random)() % fan_out_);
      case 4: return take(h);
      default: return decide_into(&coordinator_, &log_);
    }
  }

  // Until nothing is under way.
  void settle(std::vector<SimulatedRank>* ranks, Random* random) {
    const auto is_settled = [&] {
      for (size_t h = 1; h < hosts_.size(); ++h) {
        if (hosts_[h].read < log_.size() || !hosts_[h].sent.empty() ||
            hosts_[h].aggregator->next_deadline() != UINT64_MAX)
          return false;
      }
      for (SimulatedRank& rank : *ranks) {
        if (rank.log_position < log_.size() || !rank.sent.empty()) return false;
      }
      return true;
    };
    int steps = 0;
    while (!is_settled()) {
      REQUIRE(++steps < 1000000);
      const size_t number = (*random)() % ranks->size();
      move(&(*ranks)[number], static_cast<int>(number), random);
    }
    CHECK(coordinator_.pending().empty());
  }

 private:
  struct Host {
    RankSet below;
    std::unique_ptr<Aggregator> aggregator;
    size_t read = 0;  // of the log
    std::deque<std::string> sent;
  };

  size_t read_by(size_t h) const { return h == 0 ? log_.size() : hosts_[h].read; }

  void send(SimulatedRank* rank, int number, uint64_t age) {
    if (rank->sent.empty()) return;
    Message message = take_first(&rank->sent);
    const size_t h = host_of_[static_cast<size_t>(number)];
    if (h == 0) {
      CHECK_EQ(coordinator_.on_message(number, message, now_ - std::min(age, now_)).message(), "");
      return;
    }
    message.speak_for(number, age);
    CHECK_EQ(hosts_[h].aggregator->accept(message, now_).message(), "");
  }

  void receive(size_t h, size_t child) {
    if (child >= hosts_.size() || hosts_[child].sent.empty()) return;
    const Message message = take_first(&hosts_[child].sent);
    const Status status = h == 0 ? coordinator_.on_message(message, now_) : hosts_[h].aggregator->accept(message, now_);
    CHECK_EQ(status.message(), "");
  }

  void take(size_t h) {
    std::vector<Message> messages;
    hosts_[h].aggregator->take(now_, &messages);
    for (const Message& message : messages) hosts_[h].sent.push_back(encoded(message));
  }

  Coordinator coordinator_;
  size_t fan_out_;
  std::vector<Host> hosts_;
  std::vector<size_t> host_of_;  // by rank
  std::vector<Record> log_;
  uint64_t now_ = 0;
};

const Tree kTrees[] = {{{1, 1}, 1},          {{1, 2}, 1},    {{2, 1, 1}, 1},
                       {{1, 2, 3, 1, 2}, 2}, {{1, 4, 4}, 2}, {{1, 1, 1, 1, 1, 1, 1}, 2}};
const uint64_t kPatiences[] = {0, 100 * kMillisecond, kForEver};

CoordinatorOptions with_capacity(const Tree& tree, int capacity) {
  CoordinatorOptions options = options_of(tree.size());
  options.cache_capacity = capacity;
  options.fusion_threshold = 100;
  return options;
}

std::vector<std::string> sorted(std::vector<std::string> texts) {
  std::sort(texts.begin(), texts.end());
  return texts;
}

// The tensors that each round completes on a rank, which no order of messages changes.
std::vector<std::vector<std::string>> directly(const CoordinatorOptions& options, int num_rounds, int num_names) {
  DirectWiring wiring(options);
  SimulatedJob job(options.size, &wiring, 1);
  std::vector<std::vector<std::string>> completed;
  for (int round = 0; round < num_rounds; ++round) {
    job.run_round(round, num_names);
    completed.push_back(sorted(std::move(job.ranks[0].completed)));
    for (SimulatedRank& rank : job.ranks) rank.completed.clear();
  }
  return completed;
}

template <typename F>
void for_each_tree(const std::vector<int>& capacities, F run) {
  for (const Tree& tree : kTrees) {
    for (int capacity : capacities) run(tree, with_capacity(tree, capacity));
  }
}

}  // namespace

// Also if nothing is passed on before all below are ready: so no rank waits for a message that cannot come.
TEST(the_same_completes_as_without_a_tree) {
  for_each_tree({1024, 3, 0}, [](const Tree& tree, const CoordinatorOptions& options) {
    const auto expected = directly(options, 3, kNumNames);
    for (uint64_t patience : kPatiences) {
      for (unsigned seed = 0; seed < 2; ++seed) {
        TreeWiring wiring(options, tree, patience);
        SimulatedJob job(options.size, &wiring, seed);
        for (const std::vector<std::string>& round : expected) {
          job.run_round(static_cast<int>(&round - expected.data()), kNumNames);
          for (SimulatedRank& rank : job.ranks) CHECK(rank.completed == job.ranks[0].completed);
          CHECK(sorted(job.ranks[0].completed) == round);
          for (SimulatedRank& rank : job.ranks) rank.completed.clear();
        }
        Random random(seed);
        wiring.settle(&job.ranks, &random);
      }
    }
  });
}

TEST(ranks_join_below_an_aggregator) {
  for_each_tree({1024, 3, 0}, [](const Tree& tree, const CoordinatorOptions& options) {
    for (uint64_t patience : kPatiences) {
      for (unsigned seed = 0; seed < 3; ++seed) {
        TreeWiring wiring(options, tree, patience);
        SimulatedJob job(options.size, &wiring, seed);
        for (int epoch = 0; epoch < 2; ++epoch) {
          job.run_until_all_have_joined(20);
          for (SimulatedRank& rank : job.ranks) {
            REQUIRE(!rank.completed.empty());
            CHECK_EQ(rank.completed.back(), "join");
            if (&rank != &job.ranks[0]) CHECK_EQ(rank.completed.size(), size_t{21});
            rank.completed.clear();
          }
        }
        Random random(seed);
        wiring.settle(&job.ranks, &random);
      }
    }
  });
}

// Every request of a set completes, if only with an error, however long after the removal it comes.
TEST(process_sets_come_and_go_below_an_aggregator) {
  int executed = 0, failed = 0, refused = 0;
  for_each_tree({1024, 3, 0}, [&](const Tree& tree, const CoordinatorOptions& options) {
    for (uint64_t patience : kPatiences) {
      for (unsigned seed = 0; seed < 3; ++seed) {
        TreeWiring wiring(options, tree, patience);
        SimulatedJob job(options.size, &wiring, seed);
        Random random(seed);
        for (int epoch = 0; epoch < 3; ++epoch) {
          std::set<int64_t> members = {static_cast<int64_t>(random() % static_cast<unsigned>(options.size))};
          for (int rank = 0; rank < options.size; ++rank) {
            if (random() % 2 == 0) members.insert(rank);
          }
          if (members.size() == static_cast<size_t>(options.size)) members.erase(members.begin());
          job.run_with_process_set({members.begin(), members.end()}, 5);
          for (int rank = 0; rank < options.size; ++rank) {
            std::vector<std::string>& completed = job.ranks[static_cast<size_t>(rank)].completed;
            CHECK_EQ(completed.size(), size_t{1 + 5 + 1} + (members.count(rank) > 0 ? 10 : 0));
            for (const std::string& text : completed) {
              executed += text[0] == 's' ? 1 : 0;
              failed += text.substr(0, 7) == "error s" ? 1 : 0;
              refused += text.substr(0, 9) == "refused s" ? 1 : 0;
              CHECK(text.substr(0, 7) != "error t" && text.substr(0, 7) != "error a" && text.substr(0, 7) != "error r");
            }
            completed.clear();
          }
        }
        wiring.settle(&job.ranks, &random);
      }
    }
  });
  CHECK(executed > 1000);
  CHECK(failed > 100);
  CHECK(refused > 100);
}
