// Sleeping on a 32-bit word, within a process or across processes that share the word's memory.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "base/clock.h"

namespace hvl {

enum class FutexScope { kProcess, kHost };

// Sleeps while *word == expected, at most `timeout` nanoseconds. Returns EINTR if a signal came, else 0; spurious
// returns are possible, so the caller looks again.
inline int futex_wait(std::atomic<uint32_t>* word, uint32_t expected, uint64_t timeout, FutexScope scope) {
  timespec relative{static_cast<time_t>(timeout / kSecond), static_cast<long>(timeout % kSecond)};
  int operation = scope == FutexScope::kProcess ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
  long result = syscall(SYS_futex, word, operation, expected, &relative, nullptr, 0);
  return result == -1 && errno == EINTR ? EINTR : 0;
}

inline void futex_wake(std::atomic<uint32_t>* word, int count, FutexScope scope) {
  syscall(SYS_futex, word, scope == FutexScope::kProcess ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE, count, nullptr, nullptr, 0);
}

// Who sleeps by a doorbell: the engine's own thread, or a thread that waits for a result and does the engine's work
// meanwhile.
enum class Sleeper : uint32_t { kEngineThread, kWaitingThread };

// Wakes who is on duty, at the price of one shared load when he does not sleep. Any number of threads ring.
//
// The sleeper goes on duty, looks at his condition once more and only then sleeps; a ringer changes the condition and
// then looks who is on duty. All of these are sequentially consistent, so one of the two sees the other. Each sleeper
// has a word of his own: the engine's thread goes on sleeping while another one is on duty.
class Doorbell {
 public:
  void ring() {
    if (on_duty_.load() == kNobody) return;
    uint32_t sleeper = on_duty_.exchange(kNobody);
    if (sleeper == kNobody) return;
    std::atomic<uint32_t>& rings = rings_[sleeper - 1];
    rings.fetch_add(1);
    futex_wake(&rings, 1, FutexScope::kHost);
  }

  void go_on_duty(Sleeper sleeper) { on_duty_.store(index_of(sleeper) + 1); }
  // The caller is awake: rings need not wake anybody.
  void go_off_duty() { on_duty_.store(kNobody); }

  // What to hand to sleep(): read it before going on duty.
  uint32_t rings(Sleeper sleeper) const { return rings_[index_of(sleeper)].load(); }
  // Sleeps unless there was a ring since `seen`, until a ring, a signal (then it returns EINTR) or `timeout`
  // nanoseconds later.
  int sleep(Sleeper sleeper, uint32_t seen, uint64_t timeout) {
    return futex_wait(&rings_[index_of(sleeper)], seen, timeout, FutexScope::kHost);
  }

  // The same unless `condition` holds already; off duty afterwards.
  template <typename Condition>
  int sleep_unless(Sleeper sleeper, Condition&& condition, uint64_t timeout) {
    uint32_t seen = rings(sleeper);
    go_on_duty(sleeper);
    int result = condition() ? 0 : sleep(sleeper, seen, timeout);
    go_off_duty();
    return result;
  }

 private:
  static constexpr uint32_t kNobody = 0;
  static uint32_t index_of(Sleeper sleeper) { return static_cast<uint32_t>(sleeper); }

  std::atomic<uint32_t> rings_[2] = {};
  std::atomic<uint32_t> on_duty_{kNobody};  // else the sleeper's index + 1
};

}  // namespace hvl
