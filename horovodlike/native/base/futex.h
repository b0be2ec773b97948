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

// Wakes one sleeper, at the price of one shared load when nobody sleeps. One thread sleeps, any number ring.
//
// The sleeper announces itself, looks at its condition once more and only then sleeps; a ringer changes the condition
// and then looks for a sleeper. All of these are sequentially consistent, so one of the two sees the other.
class Doorbell {
 public:
  void ring() {
    if (sleeping_.load() != 0 && sleeping_.exchange(0) != 0) {
      rings_.fetch_add(1);
      futex_wake(&rings_, 1, FutexScope::kHost);
    }
  }

  // Sleeps until a ring, at most `timeout` nanoseconds, unless `condition` holds already.
  template <typename Condition>
  void sleep_unless(Condition&& condition, uint64_t timeout) {
    uint32_t seen = rings_.load();
    sleeping_.store(1);
    if (!condition()) futex_wait(&rings_, seen, timeout, FutexScope::kHost);
    sleeping_.store(0);
  }

 private:
  std::atomic<uint32_t> rings_{0};
  std::atomic<uint32_t> sleeping_{0};
};

}  // namespace hvl
