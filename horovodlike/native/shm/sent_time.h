// When a message was sent, in front of it: who reads it may have slept, and who is late is not to be a matter of when
// it was read.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/clock.h"

namespace hvl {

inline void put_time(std::string* frame) {
  const uint64_t now = now_ns();
  frame->append(reinterpret_cast<const char*>(&now), sizeof now);
}

inline uint64_t take_time(std::string* frame) {
  uint64_t sent = 0;
  if (frame->size() < sizeof sent) return now_ns();  // decode() refuses it
  memcpy(&sent, frame->data(), sizeof sent);
  frame->erase(0, sizeof sent);
  return std::min(sent, now_ns());
}

}  // namespace hvl
