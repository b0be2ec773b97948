// The clocks of the clients of an array (bounded staleness, Ho et al. 2013): a client that is too far ahead of the
// slowest one waits. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/status.h"

namespace hvl {

// Takes the ends of the ticks of a client.
class ClockClient {
 public:
  virtual ~ClockClient() = default;
  virtual void on_ticked(uint64_t number, const Status& status) = 0;
};

// A client that ticks, and the object that takes the end of the tick.
struct Ticker {
  uint64_t client = 0;
  ClockClient* waiter = nullptr;
  uint64_t number = 0;
};

class Clocks {
 public:
  static constexpr uint64_t kLeaves = UINT64_MAX;  // in place of a staleness: the client has no clock any more

  // `expected`: the number of clients. One that has not been added yet is at 0.
  explicit Clocks(uint64_t expected) : expected_(expected) {}

  uint64_t expected() const { return expected_; }
  // Adds a client, unless it is there. One that comes after all others were there begins with the slowest.
  void add(uint64_t client) {
    clocks_.emplace(client, clocks_.size() < num_live_ ? 0 : slowest());
    num_live_ = std::max<uint64_t>(num_live_, clocks_.size());
  }
  // Advances the clock of a client. The tick ends when the clock is `staleness` ahead of the slowest at most.
  void tick(const Ticker& ticker, uint64_t staleness) {
    if (staleness == kLeaves) return leave(ticker);
    const auto found = clocks_.find(ticker.client);
    if (found == clocks_.end()) {
      return end(ticker, Status(HVL_INVALID_ARGUMENT, "this client has not created the array"));
    }
    if (std::count_if(waiting_.begin(), waiting_.end(),
                      [&](const Tick& each) { return each.ticker.waiter == ticker.waiter; }) >= kMostWaiting) {
      return end(ticker, Status(HVL_INVALID_ARGUMENT, "too many ticks of this client wait"));
    }
    waiting_.push_back(Tick{ticker, ++found->second, staleness});
    end_those_due();
  }
  // The client is gone.
  void remove(uint64_t client) {
    if (clocks_.erase(client) == 0) return;
    --num_live_;
    forget([&](const Tick& tick) { return tick.ticker.client == client; });
    end_those_due();
  }
  // Nothing takes the ends of these ticks any more.
  void forget(const ClockClient* waiter) {
    forget([&](const Tick& tick) { return tick.ticker.waiter == waiter; });
  }
  // Ends all ticks with an error.
  void fail(const Status& status) {
    for (const Tick& tick : std::exchange(waiting_, {})) end(tick.ticker, status);
  }

 private:
  static constexpr int kMostWaiting = 1024;  // ticks of a client

  struct Tick {
    Ticker ticker;
    uint64_t clock;
    uint64_t staleness;
  };

  static void end(const Ticker& ticker, const Status& status) { ticker.waiter->on_ticked(ticker.number, status); }
  // The client may have left before.
  void leave(const Ticker& ticker) {
    for (const Tick& tick : waiting_) {
      if (tick.ticker.client == ticker.client) end(tick.ticker, Status());
    }
    remove(ticker.client);
    end(ticker, Status());
  }
  template <typename Which>
  void forget(Which&& which) {
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), which), waiting_.end());
  }
  uint64_t slowest() const {
    uint64_t least = clocks_.size() < num_live_ ? 0 : UINT64_MAX;
    for (const auto& [client, clock] : clocks_) least = std::min(least, clock);
    return clocks_.empty() ? 0 : least;
  }
  void end_those_due() {
    const uint64_t slow = slowest();
    const auto waits = [&](const Tick& tick) { return tick.clock > slow && tick.clock - slow > tick.staleness; };
    const auto first = std::stable_partition(waiting_.begin(), waiting_.end(), waits);
    const std::vector<Tick> due(first, waiting_.end());
    waiting_.erase(first, waiting_.end());
    for (const Tick& tick : due) end(tick.ticker, Status());
  }

  const uint64_t expected_;
  uint64_t num_live_ = expected_;  // clients that were added, or are still expected
  std::map<uint64_t, uint64_t> clocks_;
  std::vector<Tick> waiting_;
};

}  // namespace hvl
