// The coordinator's verdict on tensors that some ranks have ready and others not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "negotiate/coordinator.h"

namespace hvl {

struct StallVerdict {
  std::string warning;       // empty: nothing new to say
  bool shut_down = false;    // the job must end, with `warning` as the reason
  std::vector<int> missing;  // ranks, ascending
};

class StallInspector {
 public:
  // Seconds; 0 turns the warning off, or means that a stalled job is never ended.
  StallInspector(double warning_time, double shutdown_time);

  // `now` in nanoseconds, as `since` of the pending tensors. A stall is reported once, and again when it gets worse.
  StallVerdict inspect(const std::vector<Pending>& pending, uint64_t now);
  // A tensor that is waited for only since a later time is no stall.
  uint64_t latest_stall(uint64_t now) const;
  // True if a tensor has been waited for so long that the job must end.
  bool is_over(const std::vector<Pending>& pending, uint64_t now) const;

 private:
  bool ends_job(const Pending& tensor, uint64_t now) const;

  uint64_t warning_time_;
  uint64_t shutdown_time_;
  uint64_t last_warning_ = 0;
};

}  // namespace hvl
