// How the thread that does the engine's work waits for the other ranks of this host: it spins for a moment, then
// sleeps, and meanwhile makes sure that those it waits for are alive and get on.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shm/host_memory.h"
#include "sync/poller.h"

namespace hvl {

// To wake a sleeper takes 5 to 50 us, so it pays to spin as long when somebody waits. Unless it keeps the one that is
// waited for from running: then the limit is halved, down to the lazy one, until they have processors of their own
// again.
constexpr uint64_t kUrgentSpin = 200 * kMicrosecond;
constexpr uint64_t kLazySpin = 2 * kMicrosecond;

struct WaiterOptions {
  int local_rank = 0;
  std::vector<int> ranks;                      // global rank, by local rank
  std::vector<int> pids;                       // by local rank; empty: ranks are threads of this process, not watched
  int processors = 1;                          // that all of them may use together
  double stall_warning = 60;                   // seconds; 0 never
  double stall_shutdown = 0;                   // seconds; 0 never
  const std::atomic<bool>* leaving = nullptr;  // set when this rank is to shut down: then it waits for this long only
  uint64_t leave_timeout = kLeaveTimeout;
  std::function<void()> before_sleep = [] {};  // called before sleeping within a collective
  // Called now and then while a collective is under way: breaks the job if another host has.
  std::function<void()> check_other_hosts = [] {};
  Poller* poller = nullptr;  // of a job of several hosts: what it sleeps with
};

// That `who` did not get on with `what`, for so long, and why that may be.
struct Stall {
  std::string who;
  std::string what = "a collective that has begun";
  std::string why = "stopped, swapped out, or its processor is taken";
};

enum class Spin { kInVain, kNotNeeded, kWorthIt };

// Spins until `condition` holds, at most `limit` nanoseconds; adds how long that took to `spent`, to the nearest look
// at the clock.
//
// If it yields, whoever else could use the processor gets it now and then. Where every thread can have a processor it
// is better not to: two that yield to each other stay on one processor, a sleeper is woken on one that is free.
template <typename Condition>
Spin spin_until(Condition&& condition, uint64_t limit, bool yields, uint64_t* spent) {
  constexpr int kLooks = 16;  // between two looks at the clock
  uint64_t start = 0;
  uint64_t now = 0;
  for (;;) {
    for (int look = 0; look < kLooks; ++look) {
      if (condition()) {
        *spent += now - start;
        return start == 0 ? Spin::kNotNeeded : Spin::kWorthIt;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    now = now_ns();
    if (start == 0) start = now;
    if (now - start >= limit) {
      *spent += now - start;
      return Spin::kInVain;
    }
    if (yields) sched_yield();
  }
}

class Waiter {
 public:
  Waiter(std::shared_ptr<HostMemory> memory, WaiterOptions options);
  ~Waiter();
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // A thread of this process waits for a result: the processor has nothing better to do than to spin.
  void set_urgent(bool urgent) { urgent_ = urgent; }
  // Who is going to wait, until when he has time (now_ns() time), and what tells that he needs not go on. `enough`
  // lives until the next turn.
  void take_turn(WaitingParty sleeper, uint64_t deadline, const std::function<bool()>* enough) {
    sleeper_ = sleeper;
    deadline_ = deadline;
    enough_ = enough;
    signalled_ = false;
  }
  bool has_enough() const { return (*enough_)(); }
  // A signal came while he slept, or his time is over.
  bool is_interrupted() const { return signalled_ || now_ns() >= deadline_; }

  // Waits until `condition` holds; lags(peer) tells whether this rank waits for that local rank. HVL_IN_PROGRESS:
  // interrupted, or he has enough and would sleep. Any other error means that the job is broken.
  // `sockets`: what the condition may become true by, besides what the ranks of this host do; null: nothing.
  template <typename Condition>
  Status wait(Condition&& condition, const std::function<bool(int)>& lags, const Sockets* sockets = nullptr) {
    uint64_t spent = 0;
    const bool found = spin(condition, &spent);
    if (spent > 0) add_waited(spent);
    if (found) vain_ = {};
    return found ? Status() : sleep_until(std::function<bool()>(std::cref(condition)), lags, sockets);
  }
  // Waits until `condition` holds where no doorbell rings when it does: it is looked at again and again. who() names
  // those that are waited for. HVL_IN_PROGRESS as of wait(), and so never on the engine's own thread. Any other error
  // means that the job is broken.
  Status wait_polling(const std::function<bool()>& condition, const std::function<std::string()>& who);
  // The same for what a device of this rank does, which may take as long as it needs, also if this rank is to shut
  // down.
  Status wait_for_device(const std::function<bool()>& condition, const std::function<Stall()>& describe);
  // Warns of what has not got on for so long (nanoseconds), if it is time for that and `warned` does not say that it
  // was done. HVL_JOB_BROKEN: it is time to break the job.
  Status report_stall(uint64_t waited, bool* warned, const std::function<Stall()>& describe) const;
  // Nanoseconds that were spent in wait(), wait_polling() and wait_for_device() so far. Any thread.
  uint64_t waited() const { return waited_.load(std::memory_order_relaxed); }

  // Waits for a moment only.
  template <typename Condition>
  bool spin(Condition&& condition) {
    uint64_t ignored = 0;
    return spin(condition, &ignored);
  }
  template <typename Condition>
  bool spin(Condition&& condition, uint64_t* spent) {
    show_processor();
    const Spin result = spin_until(condition, urgent_ ? spin_limit_ : kLazySpin, crowded_, spent);
    if (result == Spin::kWorthIt) spin_limit_ = std::min(2 * spin_limit_, kUrgentSpin);
    return result != Spin::kInVain;
  }

  // Sleeps until the doorbell rings, a signal comes or `timeout` nanoseconds are over, unless `condition` holds.
  template <typename Condition>
  void sleep_unless(uint32_t listening, Condition&& condition, uint64_t timeout) {
    sleep_with([this](uint64_t limit) { return options_.poller->sleep_idle(limit); }, listening, condition, timeout);
  }

  // Breaks the job if a peer has ended without shutting down; false: it is not time yet to look again.
  bool check_peers();
  // "rank 1 (pid 4711)"
  std::string describe(int local_rank) const;

 private:
  // `poll`: how he sleeps who waits for sockets, too.
  template <typename Poll, typename Condition>
  void sleep_with(Poll&& poll, uint32_t listening, Condition&& condition, uint64_t timeout) {
    const uint64_t limit = std::min(timeout, deadline_ - std::min(now_ns(), deadline_));
    Doorbell& doorbell = memory_->rank(options_.local_rank).doorbell;
    int result = 0;
    if (options_.poller == nullptr) {
      result = doorbell.sleep_unless(sleeper_, listening, condition, limit);
    } else {
      doorbell.arm(sleeper_, listening);
      if (!condition()) result = poll(limit);
      doorbell.go_off_duty();
    }
    if (result == EINTR) signalled_ = true;
    adapt_spin_limit();
  }
  void add_waited(uint64_t time) { waited_.store(waited() + time, std::memory_order_relaxed); }
  Status sleep_until(const std::function<bool()>& condition, const std::function<bool(int)>& lags,
                     const Sockets* sockets);
  Status sleep_in_vain(const std::function<bool()>& condition, const std::function<bool(int)>& lags,
                       const Sockets* sockets);
  Status poll_until(const std::function<bool()>& condition, const std::function<void()>& check);
  void check_leaving();
  void show_processor();
  void adapt_spin_limit();
  bool somebody_lags(const std::function<bool(int)>& lags) const;
  std::string name_laggards(const std::function<bool(int)>& lags, const Sockets* sockets) const;
  void check_stall(uint64_t patience, const std::function<Stall()>& describe);

  std::shared_ptr<HostMemory> memory_;
  WaiterOptions options_;
  std::vector<int> pidfds_;  // by local rank; -1: not watched
  const bool crowded_;       // more ranks than processors
  bool urgent_ = false;
  uint64_t spin_limit_ = kUrgentSpin;
  WaitingParty sleeper_ = WaitingParty::kEngineThread;
  uint64_t deadline_ = UINT64_MAX;
  const std::function<bool()>* enough_ = nullptr;
  bool signalled_ = false;
  // What this rank waits for has not come yet. An interrupted wait goes on later, perhaps on another thread.
  struct Vain {
    uint64_t since = 0;  // now_ns() time; 0: it does not wait
    uint64_t leaving_since = 0;
    bool warned = false;
  };
  Vain vain_;
  uint64_t last_check_ = 0;
  std::atomic<uint64_t> waited_{0};  // written by who has the turn
};

}  // namespace hvl
