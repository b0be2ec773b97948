// The doorbell: a word in shared memory on which the thread that runs a rank's engine sleeps. Any rank may notify it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "base/clock.h"

namespace hvl {

// The reason for a notification. A thread names the reasons for which it must be woken: waking takes long, and the
// thread finds everything else when it wakes for one of them.
enum WakeReason : uint32_t {
  kWakeNews = 1,      // there is something to do: a new request of this rank, a record in the log, the end of the job
  kWakeReady = 2,     // another rank has announced tensors to the coordinator
  kWakeProgress = 4,  // another rank made progress in the collective under way
  kWakeRoom = 8,      // there is room in a ring buffer that was full
  kWakeMessage = 16,  // bytes of a message, or of an answer to one, have come from another rank
  kWakeAlways = 31
};

// The thread that sleeps: the engine's own thread, or a thread that waits for a result and does the engine's work
// meanwhile.
enum class WaitingParty : uint32_t { kEngineThread, kWaitingThread };

// A thread that is about to sleep arms the doorbell, checks its condition once more, and only then sleeps. A thread
// that notifies changes the condition and then checks whether the doorbell is armed, which costs one shared load if it
// is not. All of these accesses are sequentially consistent, so one of the two threads sees the other's change. Each
// party has a futex word of its own: the engine's own thread continues to sleep while a waiting thread runs the engine.
//
// A rank that also waits for sockets sleeps in poll(), where no futex wakes it: the notifying thread writes to a pipe.
class Doorbell {
 public:
  // `pipe`: the write end of the notified rank's pipe; -1: it has none.
  void notify(WakeReason why, int pipe) {
    uint32_t armed = armed_.load();
    // If `armed_` changes in between, another thread notifies, or a thread arms again and then checks its condition.
    if ((armed & why) == 0 || !armed_.compare_exchange_strong(armed, 0)) return;
    if (pipe == -1) {
      wake(static_cast<WaitingParty>(armed >> kWakeReasonBits));
    } else {
      const char byte = 0;
      while (write(pipe, &byte, 1) == -1 && errno == EINTR) {  // if the pipe is full, the rank is awake or will wake
      }
    }
  }

  // Wakes the party, whether or not it has armed the doorbell.
  void wake(WaitingParty party) {
    std::atomic<uint32_t>& notifications = notifications_[index_of(party)];
    notifications.fetch_add(1);
    futex_wake(&notifications, 1, FutexScope::kHost);
  }

  void arm(WaitingParty party, uint32_t listening) { armed_.store(index_of(party) << kWakeReasonBits | listening); }
  // Called by a thread that is awake. From now on, notifications wake no thread.
  void disarm() { armed_.store(0); }

  // The value to pass to sleep(): read it before arming.
  uint32_t notifications(WaitingParty party) const { return notifications_[index_of(party)].load(); }
  // Sleeps until a notification, a signal (then it returns EINTR) or `timeout` nanoseconds later. Returns at once if
  // there was a notification after `seen`.
  int sleep(WaitingParty party, uint32_t seen, uint64_t timeout) {
    return futex_wait(&notifications_[index_of(party)], seen, timeout, FutexScope::kHost);
  }

  // Arms the doorbell, sleeps unless `condition` holds already, and disarms the doorbell.
  template <typename Condition>
  int sleep_unless(WaitingParty party, uint32_t listening, Condition&& condition, uint64_t timeout) {
    uint32_t seen = notifications(party);
    arm(party, listening);
    int result = condition() ? 0 : sleep(party, seen, timeout);
    disarm();
    return result;
  }

 private:
  static constexpr int kWakeReasonBits = 5;
  static uint32_t index_of(WaitingParty party) { return static_cast<uint32_t>(party); }

  std::atomic<uint32_t> notifications_[2] = {};
  std::atomic<uint32_t> armed_{0};  // 0: not armed; else the reasons to wake for, and in the bits above the party
};

}  // namespace hvl
