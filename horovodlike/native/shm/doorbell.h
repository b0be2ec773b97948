// What wakes a rank's engine, whichever of its threads sleeps there, and whichever rank rings.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "base/futex.h"

namespace hvl {

// Why a doorbell is rung. A sleeper says what he listens to: waking takes long, and what does not concern him now he
// finds when he wakes for something else.
enum WakeReason : uint32_t {
  kWakeNews = 1,      // there is something to do: a new request of this rank, a record in the log, the end of the job
  kWakeReady = 2,     // another rank has told the coordinator that tensors are ready
  kWakeProgress = 4,  // another rank got on with the collective that is under way
  kWakeRoom = 8,      // there is room in a ring of messages that was full
  kWakeAlways = 15
};

// Who sleeps: the engine's own thread, or a thread that waits for a result and does the engine's work meanwhile.
enum class WaitingParty : uint32_t { kEngineThread, kWaitingThread };

// Wakes who is on duty, at the price of one shared load when he does not sleep. Any number of threads ring.
//
// The sleeper goes on duty, looks at his condition once more and only then sleeps; a ringer changes the condition and
// then looks who is on duty. All of these are sequentially consistent, so one of the two sees the other. Each sleeper
// has a word of his own: the engine's thread goes on sleeping while another one is on duty.
//
// A rank that also waits for sockets sleeps in poll(), where no futex wakes it: he who rings writes to a pipe.
class Doorbell {
 public:
  // `pipe`: the end to write to of the rank that is rung; -1: it has none.
  void notify(WakeReason why, int pipe) {
    uint32_t duty = duty_.load();
    // If it changes meanwhile, another one rings, or somebody goes on duty and then looks at his condition.
    if ((duty & why) == 0 || !duty_.compare_exchange_strong(duty, 0)) return;
    if (pipe == -1) {
      wake(static_cast<WaitingParty>(duty >> kWakeReasonBits));
    } else {
      const char byte = 0;
      while (write(pipe, &byte, 1) == -1 && errno == EINTR) {  // full: it is awake, or will be
      }
    }
  }

  // On duty or not.
  void wake(WaitingParty sleeper) {
    std::atomic<uint32_t>& notifications = notifications_[index_of(sleeper)];
    notifications.fetch_add(1);
    futex_wake(&notifications, 1, FutexScope::kHost);
  }

  void arm(WaitingParty sleeper, uint32_t listening) { duty_.store(index_of(sleeper) << kWakeReasonBits | listening); }
  // The caller is awake: rings need not wake anybody.
  void go_off_duty() { duty_.store(0); }

  // What to hand to sleep(): read it before going on duty.
  uint32_t notifications(WaitingParty sleeper) const { return notifications_[index_of(sleeper)].load(); }
  // Sleeps unless there was a ring since `seen`, until a ring, a signal (then it returns EINTR) or `timeout`
  // nanoseconds later.
  int sleep(WaitingParty sleeper, uint32_t seen, uint64_t timeout) {
    return futex_wait(&notifications_[index_of(sleeper)], seen, timeout, FutexScope::kHost);
  }

  // The same unless `condition` holds already; off duty afterwards.
  template <typename Condition>
  int sleep_unless(WaitingParty sleeper, uint32_t listening, Condition&& condition, uint64_t timeout) {
    uint32_t seen = notifications(sleeper);
    arm(sleeper, listening);
    int result = condition() ? 0 : sleep(sleeper, seen, timeout);
    go_off_duty();
    return result;
  }

 private:
  static constexpr int kWakeReasonBits = 4;
  static uint32_t index_of(WaitingParty sleeper) { return static_cast<uint32_t>(sleeper); }

  std::atomic<uint32_t> notifications_[2] = {};
  std::atomic<uint32_t> duty_{0};  // 0: nobody; else the rings that are listened to, and above them the sleeper
};

}  // namespace hvl
