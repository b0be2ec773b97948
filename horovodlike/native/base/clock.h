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

inline uint64_t to_ns(double seconds) { return seconds <= 0 ? 0 : static_cast<uint64_t>(seconds * 1e9); }

}  // namespace hvl
