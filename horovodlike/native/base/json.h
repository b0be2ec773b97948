// Output of JSON: strings, and points in time.
#pragma once

#include <cstdio>
#include <string>

#include "base/clock.h"

namespace hvl {

inline std::string quoted(const std::string& text) {
  std::string json = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      json += '\\';
      json += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
      json += escaped;
    } else {
      json += c;
    }
  }
  return json + '"';
}

// Converts now_ns() times to time since the epoch, with the offset between the clocks at construction, or another one.
class EpochClock {
 public:
  explicit EpochClock(uint64_t offset) : offset_(offset) {}
  EpochClock() {
    const uint64_t before = now_ns();
    timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    const uint64_t now = before + (now_ns() - before) / 2;
    offset_ = static_cast<uint64_t>(time.tv_sec) * kSecond + static_cast<uint64_t>(time.tv_nsec) - now;
  }

  uint64_t nanoseconds(uint64_t time) const { return time + offset_; }
  // Seconds since the epoch, to the microsecond.
  std::string seconds(uint64_t time) const {
    char text[32];
    const uint64_t microseconds = nanoseconds(time) / kMicrosecond;
    std::snprintf(text, sizeof text, "%llu.%06llu", static_cast<unsigned long long>(microseconds / 1000000),
                  static_cast<unsigned long long>(microseconds % 1000000));
    return text;
  }

 private:
  uint64_t offset_;
};

}  // namespace hvl
