// The cost of negotiating known tensors, by the number of ranks: hosts of 8 ranks, all in this process, with encoded
// messages in memory for channels.
//
//   negotiation_cost RANKS FAN_OUT [TENSORS] [ROUNDS]     FAN_OUT 0: every rank talks to the coordinator
//
// Prints one line of JSON. In each round all ranks announce all tensors, each tensor in a message of its own and each
// rank in an order of its own. Fails if anything is not executed exactly once in each round, or if a process gets more
// messages for a tensor than it has child hosts and ranks of its own.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "coordinator_driver.h"
#include "negotiate/aggregator.h"

using namespace hvl;

namespace {

constexpr int kRanksPerHost = 8;

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::exit(1);
}

void require(const Status& status) {
  if (!status.ok()) fail(status.message());
}

// The input of a process, in the order of arrival.
struct Inbox {
  struct Frame {
    int rank;  // of this host; -1: a child host
    std::string bytes;
  };
  std::vector<std::vector<Frame>> steps;
  size_t num_frames = 0;
};

class Job {
 public:
  Job(int size, int fan_out, int num_tensors)
      : size_(size), fan_out_(fan_out), num_tensors_(num_tensors), driver_(size), num_executed_(num_tensors + 1) {
    const int num_hosts = fan_out == 0 ? 1 : (size + kRanksPerHost - 1) / kRanksPerHost;
    std::vector<RankSet> below(static_cast<size_t>(num_hosts));
    for (int rank = 0; rank < size; ++rank) {
      for (int host = host_of(rank); host > 0; host = parent_of(host)) below[static_cast<size_t>(host)].add(rank);
    }
    for (int host = 0; host < num_hosts; ++host) {
      AggregatorOptions options;
      options.ranks = below[static_cast<size_t>(host)];
      aggregators_.push_back(std::make_unique<Aggregator>(options));
    }
    inboxes_.resize(aggregators_.size());
    for (int tensor = 0; tensor < num_tensors; ++tensor) driver_.request_all(allreduce_of(std::to_string(tensor)));
    driver_.decide();
    observe();
  }

  // Leaves the time of the coordinator, and of the aggregator that has most ranks below it, in nanoseconds.
  void run_round(uint64_t* coordinator, uint64_t* aggregator) {
    announce();
    *aggregator = 0;
    for (int host = static_cast<int>(aggregators_.size()) - 1; host > 0; --host) *aggregator = run_aggregator(host);
    *coordinator = run_coordinator();
    observe();
    for (TensorId id = 1; id <= static_cast<TensorId>(num_tensors_); ++id) {
      if (num_executed_[id] != 1) fail("tensor " + std::to_string(id) + " was not executed once");
    }
  }

  // Of the process that got the most in a round, for each tensor.
  double most_messages() const {
    size_t most = 0;
    for (const Inbox& inbox : inboxes_) most = std::max(most, inbox.num_frames);
    return static_cast<double>(most) / num_tensors_;
  }

  size_t num_hosts() const { return aggregators_.size(); }

 private:
  int host_of(int rank) const { return fan_out_ == 0 ? 0 : rank / kRanksPerHost; }
  int parent_of(int host) const { return (host - 1) / fan_out_; }

  // Ranks begin with one of the first 16 tensors, so that a tensor is on the way for some time.
  void announce() {
    for (Inbox& inbox : inboxes_) {
      inbox = Inbox();
      inbox.steps.resize(static_cast<size_t>(num_tensors_));
    }
    Message message;
    for (int rank = 0; rank < size_; ++rank) {
      Inbox& inbox = inboxes_[static_cast<size_t>(host_of(rank))];
      for (int step = 0; step < num_tensors_; ++step) {
        message.ids = {static_cast<TensorId>(1 + (step + rank * 7 % 16) % num_tensors_)};
        Inbox::Frame frame{rank, ""};
        encode(message, &frame.bytes);
        inbox.steps[static_cast<size_t>(step)].push_back(std::move(frame));
      }
    }
  }

  uint64_t run_aggregator(int host) {
    Inbox& inbox = inboxes_[static_cast<size_t>(host)];
    Inbox& parent = inboxes_[static_cast<size_t>(parent_of(host))];
    Aggregator& aggregator = *aggregators_[static_cast<size_t>(host)];
    Message message;
    std::vector<Message> messages;
    const uint64_t begin = now_ns();
    for (size_t step = 0; step < inbox.steps.size(); ++step) {
      for (const Inbox::Frame& frame : inbox.steps[step]) {
        require(decode(frame.bytes.data(), frame.bytes.size(), &message));
        if (frame.rank >= 0) message.speak_for(frame.rank, 0);
        require(aggregator.accept(message, kNow));
        ++inbox.num_frames;
      }
      messages.clear();
      aggregator.take(kNow, &messages);
      for (const Message& combined : messages) {
        Inbox::Frame frame{-1, ""};
        encode(combined, &frame.bytes);
        parent.steps[step].push_back(std::move(frame));
      }
    }
    const uint64_t time = now_ns() - begin;
    if (aggregator.next_deadline() != UINT64_MAX) fail("host " + std::to_string(host) + " has kept something");
    return time;
  }

  uint64_t run_coordinator() {
    Inbox& inbox = inboxes_[0];
    Message message;
    std::string bytes;
    driver_.last.clear();
    const uint64_t begin = now_ns();
    for (const std::vector<Inbox::Frame>& step : inbox.steps) {
      for (const Inbox::Frame& frame : step) {
        require(decode(frame.bytes.data(), frame.bytes.size(), &message));
        require(frame.rank >= 0 ? driver_.coordinator.on_message(frame.rank, message, kNow)
                                : driver_.coordinator.on_message(message, kNow));
        ++inbox.num_frames;
      }
      const size_t first = driver_.last.size();
      driver_.coordinator.decide(&driver_.last);
      for (size_t i = first; i < driver_.last.size(); ++i) {
        bytes.clear();
        encode(driver_.last[i].record, &bytes);
      }
    }
    return now_ns() - begin;
  }

  void observe() {
    std::fill(num_executed_.begin(), num_executed_.end(), 0);
    for (const Decision& decision : driver_.last) {
      for (auto& aggregator : aggregators_) aggregator->observe(decision.record);
      if (decision.record.type != Record::Type::kExecute) continue;
      for (TensorId id : decision.record.ids) ++num_executed_[id];
    }
  }

  static constexpr uint64_t kNow = kSecond;  // of all clocks, all the time: nothing goes on because it is old

  int size_, fan_out_, num_tensors_;
  CoordinatorDriver driver_;
  std::vector<std::unique_ptr<Aggregator>> aggregators_;  // by host; the first one's has nothing to do
  std::vector<Inbox> inboxes_;                            // by host
  std::vector<int> num_executed_;                         // by id, in this round
};

double median(std::vector<uint64_t> times) {
  std::sort(times.begin(), times.end());
  return static_cast<double>(times[times.size() / 2]);
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int index, int otherwise) { return argc > index ? std::atoi(argv[index]) : otherwise; };
  const int size = argument(1, 0);
  const int fan_out = argument(2, -1);
  const int num_tensors = argument(3, 100);
  const int num_rounds = argument(4, 11);
  if (size < 1 || size > kMaxRanks || fan_out < 0 || num_tensors < 1 || num_rounds < 1) {
    fail("usage: negotiation_cost RANKS FAN_OUT [TENSORS] [ROUNDS]");
  }
  Job job(size, fan_out, num_tensors);
  std::vector<uint64_t> coordinator(static_cast<size_t>(num_rounds));
  std::vector<uint64_t> aggregator(static_cast<size_t>(num_rounds));
  double most_messages = 0;
  for (size_t round = 0; round < coordinator.size(); ++round) {
    job.run_round(&coordinator[round], &aggregator[round]);
    most_messages = std::max(most_messages, job.most_messages());
  }
  std::printf(
      "{\"ranks\": %d, \"hosts\": %zu, \"fan_out\": %d, \"coordinator_ns\": %.1f, \"aggregator_ns\": %.1f, "
      "\"messages\": "
      "%.2f}\n",
      size, job.num_hosts(), fan_out, median(coordinator) / num_tensors, median(aggregator) / num_tensors,
      most_messages);
  if (fan_out > 0 && most_messages > fan_out + kRanksPerHost)
    fail("a process has got more messages than it has children");
  return 0;
}
