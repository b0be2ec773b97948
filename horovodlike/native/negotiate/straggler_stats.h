// The time that the others have waited for a rank: it shows which rank is slow.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/clock.h"

namespace hvl {

// A rank that is this much later than the first one is late; less is chance.
constexpr uint64_t kLate = kMillisecond;

struct StragglerStats {
  int64_t times = 0;           // how often the rank was late
  uint64_t waited = 0;         // nanoseconds
  uint64_t counted_until = 0;  // so that time in which others wait for several tensors counts once

  // The rank was the last one to have a tensor ready, at `ready`; the first one had it `since`.
  void add(uint64_t since, uint64_t ready) {
    const uint64_t begin = std::max(since, counted_until);
    if (ready <= begin) return;
    waited += ready - begin;
    times += ready - begin >= kLate ? 1 : 0;
    counted_until = ready;
  }
};

// A rank and the time at which it was ready, in one number, so that the greatest number is the latest rank: 48 bits for
// microseconds (nine years), 16 bits for the rank.
class ReadyMark {
 public:
  ReadyMark() = default;
  ReadyMark(uint64_t time, int rank) : bits_((time / kUnit) << kRankBits | (static_cast<uint64_t>(rank) & kRankMask)) {}

  uint64_t time() const { return (bits_ >> kRankBits) * kUnit; }
  int rank() const { return static_cast<int>(bits_ & kRankMask); }
  bool operator<(const ReadyMark& other) const { return bits_ < other.bits_; }

 private:
  static constexpr uint64_t kUnit = kMicrosecond;
  static constexpr int kRankBits = 16;
  static constexpr uint64_t kRankMask = (1u << kRankBits) - 1;

  uint64_t bits_ = 0;
};

}  // namespace hvl
