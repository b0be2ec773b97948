// Cuts the batches of a job into samples of some training steps each.
//
// Steps are not marked, so they are detected by tensors that come back: a sample of n steps ends when a tensor appears
// for the time n + 1. The step before each sample is left out, since it began with other values.
//
// A phase in which something else is reduced, such as a validation, makes one long sample instead of many: a sample has
// at least half the bytes of the largest one so far. The same holds for a pause. The search tolerates a single odd
// sample.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace hvl {

struct Sample {
  int64_t num_bytes = 0;
  int64_t largest_batch = 0;
  uint64_t duration = 0;  // nanoseconds

  double score() const;  // bytes per microsecond, including pauses, which the user waits for as well
};

class Sampler {
 public:
  explicit Sampler(int steps) : steps_(steps) {}

  // A batch begins at `now`, in nanoseconds. `tensors`: numbers that stand for their names. True if a sample has ended
  // before this batch; then it is in *sample.
  bool on_batch(const std::vector<uint64_t>& tensors, int64_t num_bytes, uint64_t now, Sample* sample);

 private:
  bool has_come_back(const std::vector<uint64_t>& tensors) const;

  const int steps_;
  bool is_left_out_ = true;  // this is the step between two samples
  std::unordered_map<uint64_t, int> counts_;
  Sample current_;
  uint64_t begun_ = 0;
  int64_t most_bytes_ = 0;
};

}  // namespace hvl
