// How the engine thread waits for the other ranks of this host: it spins for a moment, then sleeps, and meanwhile
// makes sure that those it waits for are alive and get on.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/shm/host_memory.h"

namespace hvl {

struct WaiterOptions {
  int local_rank = 0;
  std::vector<int> ranks;     // global rank, by local rank
  std::vector<int> pids;      // by local rank; empty: ranks are threads of this process, not watched
  int processors = 1;         // that all of them may use together
  double stall_warning = 60;  // seconds; 0 never
  double stall_shutdown = 0;  // seconds; 0 never
  const std::atomic<bool>* leaving =
      nullptr;  // set when this rank is to shut down: then it waits for some seconds only
};

class Waiter {
 public:
  Waiter(std::shared_ptr<HostMemory> memory, WaiterOptions options);
  ~Waiter();
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // A thread of this process waits for a result: the processor has nothing better to do than to spin.
  void set_urgent(bool urgent) { urgent_ = urgent; }

  // Waits until `condition` holds; lags(peer) tells whether this rank waits for that local rank. An error means that
  // the job is broken.
  template <typename Condition>
  Status wait(Condition&& condition, const std::function<bool(int)>& lags) {
    if (spin(condition)) return Status();
    return sleep_until(std::function<bool()>(std::cref(condition)), lags);
  }

  // Sleeps until the doorbell rings or `timeout` nanoseconds are over, unless `condition` holds after a short spin.
  template <typename Condition>
  void idle(Condition&& condition, uint64_t timeout) {
    if (!spin(condition)) memory_->rank(options_.local_rank).doorbell.sleep_unless(condition, timeout);
  }

  // Breaks the job if a peer has ended without shutting down. Cheap enough to be called every few milliseconds.
  void check_peers();
  // "rank 1 (pid 4711)"
  std::string describe(int local_rank) const;

 private:
  template <typename Condition>
  bool spin(Condition&& condition) {
    uint64_t limit = urgent_ ? urgent_spin_ : lazy_spin_;
    uint64_t start = 0;
    for (uint32_t round = 0;; ++round) {
      if (condition()) return true;
      pause();
      if (round % 16 != 15) continue;
      uint64_t now = now_ns();
      if (start == 0) start = now;
      if (now - start >= limit) return false;
    }
  }
  static void pause();
  Status sleep_until(const std::function<bool()>& condition, const std::function<bool(int)>& lags);
  void check_leaving(uint64_t* leaving_since);
  void check_stall(uint64_t waited, const std::function<bool(int)>& lags, bool* warned);

  std::shared_ptr<HostMemory> memory_;
  WaiterOptions options_;
  std::vector<int> pidfds_;  // by local rank; -1: not watched
  uint64_t urgent_spin_;
  uint64_t lazy_spin_;
  bool urgent_ = false;
  uint64_t last_check_ = 0;
};

}  // namespace hvl
