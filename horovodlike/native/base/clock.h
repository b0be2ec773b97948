// Monotonic time in nanoseconds.
#pragma once

#include <time.h>

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

// At most a century, so that sums do not overflow.
inline uint64_t to_ns(double seconds) {
  constexpr double kCentury = 3.2e9;
  if (!(seconds > 0)) return 0;
  return static_cast<uint64_t>((seconds < kCentury ? seconds : kCentury) * 1e9);
}

// The longest time that a rank waits for the others when it shuts down.
constexpr uint64_t kLeaveTimeout = 5 * kSecond;

}  // namespace hvl
