// What is tuned while a job runs. Results have the same bits whatever the values are.
#pragma once

#include <cstdint>

namespace hvl {

struct Tuned {
  int64_t fusion_threshold = 128 << 20;  // bytes of a batch at most
  double cycle_time = 0;                 // seconds that rank 0, and so all, wait for more requests

  bool operator==(const Tuned& other) const {
    return fusion_threshold == other.fusion_threshold && cycle_time == other.cycle_time;
  }
  bool operator!=(const Tuned& other) const { return !(*this == other); }
};

}  // namespace hvl
