// The doorbell wakes a rank's engine: any rank may notify, and any of the engine's threads may sleep on it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "base/clock.h"

namespace hvl {

// The reason for a notification. A sleeper names the reasons for which it wakes: waking takes long, and it finds
// everything else when it wakes for one of them.
enum WakeReason : uint32_t {
  kWakeNews = 1,      // there is something to do: a new request of this rank, a record in the log, the end of the job
  kWakeReady = 2,     // another rank has told the coordinator that tensors are ready
  kWakeProgress = 4,  // another rank made progress in the collective under way
  kWakeRoom = 8,      // there is room in a ring buffer that was full
  kWakeAlways = 15
};

// The thread that sleeps: the engine's own thread, or a thread that waits for a result and does the engine's work
// meanwhile.
enum class WaitingParty : uint32_t { kEngineThread, kWaitingThread };

// Wakes the thread that has armed it, at the cost of one shared load if none has. Any number of threads notify.
//
// The sleeper arms the doorbell, checks its condition once more and only then sleeps; a notifier changes the condition
// and then checks which thread has armed the doorbell. All of these are sequentially consistent, so one of the two sees
// the other. Each sleeper has its own futex word: the engine's thread continues to sleep after another one has armed
// the doorbell.
//
// A rank that also waits for sockets sleeps in poll(), where no futex wakes it: the notifier writes to a pipe.
class Doorbell {
 public:
  // `pipe`: the write end of the notified rank's pipe; -1: it has none.
  void notify(WakeReason why, int pipe) {
    uint32_t armed = armed_.load();
    // If it changes meanwhile, another thread notifies, or a thread arms the doorbell and then checks its condition.
    if ((armed & why) == 0 || !armed_.compare_exchange_strong(armed, 0)) return;
    if (pipe == -1) {
      wake(static_cast<WaitingParty>(armed >> kWakeReasonBits));
    } else {
      const char byte = 0;
      while (write(pipe, &byte, 1) == -1 && errno == EINTR) {  // full: it is awake, or will be
      }
    }
  }

  // Wakes the sleeper, whether or not it has armed the doorbell.
  void wake(WaitingParty sleeper) {
    std::atomic<uint32_t>& notifications = notifications_[index_of(sleeper)];
    notifications.fetch_add(1);
    futex_wake(&notifications, 1, FutexScope::kHost);
  }

  void arm(WaitingParty sleeper, uint32_t listening) { armed_.store(index_of(sleeper) << kWakeReasonBits | listening); }
  // The caller is awake: notifications do not wake any thread.
  void disarm() { armed_.store(0); }

  // The value to pass to sleep(): read it before arming.
  uint32_t notifications(WaitingParty sleeper) const { return notifications_[index_of(sleeper)].load(); }
  // Sleeps unless there was a notification since `seen`, until a notification, a signal (then it returns EINTR) or
  // `timeout` nanoseconds later.
  int sleep(WaitingParty sleeper, uint32_t seen, uint64_t timeout) {
    return futex_wait(&notifications_[index_of(sleeper)], seen, timeout, FutexScope::kHost);
  }

  // Arms the doorbell, does the same unless `condition` holds already, and disarms it.
  template <typename Condition>
  int sleep_unless(WaitingParty sleeper, uint32_t listening, Condition&& condition, uint64_t timeout) {
    uint32_t seen = notifications(sleeper);
    arm(sleeper, listening);
    int result = condition() ? 0 : sleep(sleeper, seen, timeout);
    disarm();
    return result;
  }

 private:
  static constexpr int kWakeReasonBits = 4;
  static uint32_t index_of(WaitingParty sleeper) { return static_cast<uint32_t>(sleeper); }

  std::atomic<uint32_t> notifications_[2] = {};
  std::atomic<uint32_t> armed_{0};  // 0: by no thread; else the reasons to wake for, and above them the sleeper
};

}  // namespace hvl
