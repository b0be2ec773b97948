// Monotonic time in nanoseconds; and futexes: a thread sleeps on a 32-bit word, within a process or across processes
// that share the word's memory.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace hvl {

constexpr uint64_t kMicrosecond = 1000;
constexpr uint64_t kMillisecond = 1000 * kMicrosecond;
constexpr uint64_t kSecond = 1000 * kMillisecond;

inline uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * kSecond + static_cast<uint64_t>(time.tv_nsec);
}

// Returns at most a century, so that sums do not overflow.
inline uint64_t to_ns(double seconds) {
  constexpr double kCentury = 3.2e9;
  if (!(seconds > 0)) return 0;
  return static_cast<uint64_t>((seconds < kCentury ? seconds : kCentury) * 1e9);
}

// The longest time that a rank waits for the others when it shuts down.
constexpr uint64_t kLeaveTimeout = 5 * kSecond;

// The time that a rank, after an error, waits for another rank or its own engine to report the cause.
constexpr uint64_t kTimeToSayWhy = 300 * kMillisecond;

enum class FutexScope { kProcess, kHost };

// Sleeps while *word == expected, at most `timeout` nanoseconds. Returns EINTR after a signal, else 0. It may also
// return for no reason, so the caller must check its condition again.
inline int futex_wait(std::atomic<uint32_t>* word, uint32_t expected, uint64_t timeout, FutexScope scope) {
  timespec relative{static_cast<time_t>(timeout / kSecond), static_cast<long>(timeout % kSecond)};
  int operation = scope == FutexScope::kProcess ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT;
  long result = syscall(SYS_futex, word, operation, expected, &relative, nullptr, 0);
  return result == -1 && errno == EINTR ? EINTR : 0;
}

inline void futex_wake(std::atomic<uint32_t>* word, int count, FutexScope scope) {
  syscall(SYS_futex, word, scope == FutexScope::kProcess ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE, count, nullptr, nullptr, 0);
}

}  // namespace hvl
