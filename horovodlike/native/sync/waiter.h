// Waiting for the other ranks of this host, for the thread that does the engine's work: it spins briefly, then sleeps,
// and meanwhile checks that the awaited ranks are alive and make progress.
#pragma once

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
#include "sync/spinner.h"

namespace hvl {

// A collective that takes longer shows this often that bytes move between hosts.
constexpr uint64_t kMovedInterval = 500 * kMillisecond;

struct WaiterOptions {
  int local_rank = 0;
  std::vector<int> ranks;                      // global rank, by local rank
  std::vector<int> pids;                       // by local rank; empty: ranks are threads of this process, not watched
  int processors = 1;                          // available to all of them together
  double stall_warning = 60;                   // seconds; 0 never
  double stall_shutdown = 0;                   // seconds; 0 never
  const std::atomic<bool>* leaving = nullptr;  // set when this rank must shut down: it waits for leave_timeout at most
  uint64_t leave_timeout = kLeaveTimeout;
  std::function<void()> before_sleep = [] {};  // called before sleeping within a collective
  // Called now and then while a collective is under way: breaks the job if another host has broken it.
  std::function<void()> check_other_hosts = [] {};
  Poller* poller = nullptr;  // in a job of several hosts: used for sleeping
};

// A report that `who` made no progress with `what`, with a possible reason.
struct Stall {
  std::string who;
  std::string what = "a collective that has begun";
  std::string why = "stopped, swapped out, or its processor is taken";
};

// The state of a process of this host as ps shows it, from /proc; '?' if it cannot be read.
char state_of(int pid);

// True if a signal or a debugger has stopped the process.
bool is_stopped(int pid);

class Waiter {
 public:
  Waiter(std::shared_ptr<HostMemory> memory, WaiterOptions options);
  ~Waiter();
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

  // As in Spinner.
  void set_urgent(bool urgent) { spinner_.set_urgent(urgent); }
  // Describes the waits that follow: the waiting thread, its deadline (now_ns() clock), and a predicate that ends a
  // wait early. `enough` must live until the next turn.
  void take_turn(WaitingParty party, uint64_t deadline, const std::function<bool()>* enough) {
    party_ = party;
    deadline_ = deadline;
    enough_ = enough;
    signalled_ = false;
  }
  bool has_enough() const { return (*enough_)(); }
  // True if a signal came during a sleep, or the deadline has passed.
  bool is_interrupted() const { return signalled_ || now_ns() >= deadline_; }

  // Waits until `condition` holds; lags(peer) is true if this rank waits for that local rank. HVL_IN_PROGRESS:
  // interrupted, or `enough` holds and the thread would have to sleep. Any other error means that the job is broken.
  // `sockets`: they may make the condition true, too; null: only ranks of this host do.
  template <typename Condition>
  Status wait(Condition&& condition, const std::function<bool(int)>& lags, const Sockets* sockets = nullptr) {
    uint64_t spent = 0;
    const bool found = spinner_.spin(condition, &spent);
    if (spent > 0) waited_.fetch_add(spent, std::memory_order_relaxed);
    if (found) vain_ = {};
    const Status status = found ? Status() : sleep_until(std::function<bool()>(std::cref(condition)), lags, sockets);
    if (sockets != nullptr && status.ok()) note_moved();
    return status;
  }
  // The waits that follow belong to another collective.
  void begin_collective() { first_moved_ = 0; }
  // Waits for a `condition` that no notification announces: it is polled. who() names the awaited ranks.
  // HVL_IN_PROGRESS as in wait(), and so never on the engine's own thread. Any other error means that the job is
  // broken.
  Status wait_polling(const std::function<bool()>& condition, const std::function<std::string()>& who);
  // As wait_polling(), for work of this rank's device. It may take any time: a shutdown does not limit it.
  Status wait_for_device(const std::function<bool()>& condition, const std::function<Stall()>& describe);
  // Warns of a stall that has lasted for `waited` nanoseconds, if that is long enough and *warned is not set yet.
  // HVL_JOB_BROKEN: the caller must break the job.
  Status report_stall(uint64_t waited, bool* warned, const std::function<Stall()>& describe) const;
  // Nanoseconds spent in wait(), wait_polling() and wait_for_device() so far. Any thread.
  uint64_t waited() const { return waited_.load(std::memory_order_relaxed); }

  // Spins briefly; true if `condition` holds.
  template <typename Condition>
  bool spin(Condition&& condition) {
    uint64_t ignored = 0;
    return spinner_.spin(condition, &ignored);
  }

  // Sleeps until a notification, a signal or `timeout` nanoseconds later, unless `condition` holds.
  template <typename Condition>
  void sleep_unless(uint32_t listening, Condition&& condition, uint64_t timeout) {
    sleep_with([this](uint64_t limit) { return options_.poller->sleep_idle(limit); }, listening, condition, timeout);
  }

  // Breaks the job if a peer has exited without shutting down; false: the next check is not due yet.
  bool check_peers();
  // "rank 1 (pid 4711)"
  std::string describe(int local_rank) const;

 private:
  // `poll`: sleeps if this rank also waits for sockets.
  template <typename Poll, typename Condition>
  void sleep_with(Poll&& poll, uint32_t listening, Condition&& condition, uint64_t timeout) {
    const uint64_t limit = std::min(timeout, deadline_ - std::min(now_ns(), deadline_));
    Doorbell& doorbell = memory_->rank(options_.local_rank).doorbell;
    int result = 0;
    if (options_.poller == nullptr) {
      result = doorbell.sleep_unless(party_, listening, condition, limit);
    } else {
      doorbell.arm(party_, listening);
      if (!condition()) result = poll(limit);
      doorbell.disarm();
    }
    if (result == EINTR) signalled_ = true;
    spinner_.adapt();
  }
  void note_moved();
  Status sleep_until(const std::function<bool()>& condition, const std::function<bool(int)>& lags,
                     const Sockets* sockets);
  Status sleep_in_vain(const std::function<bool()>& condition, const std::function<bool(int)>& lags,
                       const Sockets* sockets);
  Status poll_until(const std::function<bool()>& condition, const std::function<void()>& check);
  void check_leaving();
  // The other ranks of this host that the predicate is true of, as text; empty: none.
  std::string describe_peers(const std::function<bool(int)>& is_meant) const;
  std::string name_laggards(const std::function<bool(int)>& lags, const Sockets* sockets) const;
  void check_stall(uint64_t patience, const std::function<Stall()>& describe);

  std::shared_ptr<HostMemory> memory_;
  WaiterOptions options_;
  std::vector<int> pidfds_;  // by local rank; -1: not watched
  Spinner spinner_;
  WaitingParty party_ = WaitingParty::kEngineThread;
  uint64_t deadline_ = UINT64_MAX;
  const std::function<bool()>* enough_ = nullptr;
  bool signalled_ = false;
  // The wait under way. An interrupted wait continues later, perhaps on another thread.
  struct Vain {
    uint64_t since = 0;  // now_ns() clock; 0: no wait
    uint64_t leaving_since = 0;
    bool warned = false;
  };
  Vain vain_;
  uint64_t last_check_ = 0;
  uint64_t first_moved_ = 0;         // when a wait for sockets first ended in the collective under way; 0: not yet
  std::atomic<uint64_t> waited_{0};  // written by the thread that has the turn
};

}  // namespace hvl
