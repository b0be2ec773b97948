// Cuts the batches of a job into samples of some training steps each.
//
// Steps are not marked, so they are detected by tensors that are reduced again: a sample of n steps ends when a tensor
// appears for the (n + 1)-th time. The step before each sample is not measured, since it began with other tuned values.
//
// A sample has at least half the bytes of the largest one so far. So a phase in which something else is reduced, such
// as a validation, makes one long sample instead of many, and so does a pause. The search tolerates a single odd
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

  // Called when a batch begins, at `now` in nanoseconds. `tensors`: numbers that stand for their names. True if a
  // sample has ended before this batch; then it is in *sample.
  bool on_batch(const std::vector<uint64_t>& tensors, int64_t num_bytes, uint64_t now, Sample* sample);

 private:
  bool has_come_back(const std::vector<uint64_t>& tensors) const;

  const int steps_;
  bool is_left_out_ = true;  // the current step is between two samples and is not measured
  std::unordered_map<uint64_t, int> counts_;
  Sample current_;
  uint64_t begun_ = 0;
  int64_t most_bytes_ = 0;
};

}  // namespace hvl
