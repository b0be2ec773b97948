// The clocks of the clients of an array (bounded staleness, Ho et al. 2013): a client that is too far ahead of the
// slowest one waits. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "base/status.h"

namespace hvl {

// Takes the ends of the ticks of a client.
class ClockClient {
 public:
  virtual ~ClockClient() = default;
  virtual void on_ticked(uint64_t number, const Status& status) = 0;
};

class Clocks {
 public:
  static constexpr uint64_t kLeaves = UINT64_MAX;  // in place of a staleness: the client has no clock any more

  // `expected`: the number of clients. One that has not been added yet is at 0.
  explicit Clocks(uint64_t expected) : expected_(expected) {}

  uint64_t expected() const { return expected_; }
  // Adds a client, unless it is there. One that comes after all others were there begins with the slowest.
  void add(ClockClient* client) {
    clocks_.emplace(client, clocks_.size() < num_live_ ? 0 : slowest());
    num_live_ = std::max<uint64_t>(num_live_, clocks_.size());
  }
  // Advances the clock of a client. The tick ends when the clock is `staleness` ahead of the slowest at most.
  void tick(ClockClient* client, uint64_t number, uint64_t staleness) {
    const auto found = clocks_.find(client);
    if (found == clocks_.end()) {
      return client->on_ticked(number, Status(HVL_INVALID_ARGUMENT, "this client has not created the array"));
    }
    if (staleness == kLeaves) return leave(client, number);
    if (std::count_if(waiting_.begin(), waiting_.end(), [&](const Tick& each) { return each.client == client; }) >=
        kMostWaiting) {
      return client->on_ticked(number, Status(HVL_INVALID_ARGUMENT, "too many ticks of this client wait"));
    }
    ++found->second;
    waiting_.push_back(Tick{client, number, found->second, staleness});
    end_those_due();
  }
  // The client is gone.
  void remove(ClockClient* client) {
    if (clocks_.erase(client) == 0) return;
    --num_live_;
    const auto is_its = [&](const Tick& tick) { return tick.client == client; };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_its), waiting_.end());
    end_those_due();
  }
  // Ends all ticks with an error.
  void fail(const Status& status) {
    for (const Tick& tick : waiting_) tick.client->on_ticked(tick.number, status);
    waiting_.clear();
  }

 private:
  static constexpr int kMostWaiting = 1024;  // ticks of a client

  struct Tick {
    ClockClient* client;
    uint64_t number;
    uint64_t clock;
    uint64_t staleness;
  };

  void leave(ClockClient* client, uint64_t number) {
    for (const Tick& tick : waiting_) {
      if (tick.client == client) client->on_ticked(tick.number, Status());
    }
    remove(client);
    client->on_ticked(number, Status());
  }
  uint64_t slowest() const {
    uint64_t least = clocks_.size() < num_live_ ? 0 : UINT64_MAX;
    for (const auto& [client, clock] : clocks_) least = std::min(least, clock);
    return clocks_.empty() ? 0 : least;
  }
  void end_those_due() {
    const uint64_t slow = slowest();
    const auto waits = [&](const Tick& tick) { return tick.clock > slow && tick.clock - slow > tick.staleness; };
    const auto due = std::stable_partition(waiting_.begin(), waiting_.end(), waits);
    for (auto tick = due; tick != waiting_.end(); ++tick) tick->client->on_ticked(tick->number, Status());
    waiting_.erase(due, waiting_.end());
  }

  const uint64_t expected_;
  uint64_t num_live_ = expected_;  // clients that were added, or are still expected
  std::map<ClockClient*, uint64_t> clocks_;
  std::vector<Tick> waiting_;
};

}  // namespace hvl
