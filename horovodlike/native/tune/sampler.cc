#include "tune/sampler.h"

#include <algorithm>

namespace hvl {

namespace {

// A job whose names never come back has no steps, and must not take more and more memory.
constexpr size_t kMaxTensors = 1 << 16;

}  // namespace

double Sample::score() const {
  return static_cast<double>(num_bytes) * 1000 / static_cast<double>(std::max<uint64_t>(1, duration));
}

bool Sampler::has_come_back(const std::vector<uint64_t>& tensors) const {
  const int steps = is_left_out_ ? 1 : steps_;
  return std::any_of(tensors.begin(), tensors.end(), [&](uint64_t tensor) {
    const auto count = counts_.find(tensor);
    return count != counts_.end() && count->second >= steps;
  });
}

bool Sampler::on_batch(const std::vector<uint64_t>& tensors, int64_t num_bytes, uint64_t now, Sample* sample) {
  const bool is_over = has_come_back(tensors) && (is_left_out_ || current_.num_bytes >= most_bytes_ / 2);
  const bool has_sample = is_over && !is_left_out_;
  if (has_sample) {
    current_.duration = now - begun_;
    most_bytes_ = std::max(most_bytes_, current_.num_bytes);
    *sample = current_;
  }
  if (is_over) is_left_out_ = !is_left_out_;
  if (is_over || counts_.empty() || counts_.size() > kMaxTensors) {
    counts_.clear();
    current_ = Sample();
    begun_ = now;
  }
  for (uint64_t tensor : tensors) ++counts_[tensor];
  current_.num_bytes += num_bytes;
  current_.largest_batch = std::max(current_.largest_batch, num_bytes);
  return has_sample;
}

}  // namespace hvl
