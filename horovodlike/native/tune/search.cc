#include "tune/search.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <utility>

namespace hvl {

namespace {

constexpr std::ptrdiff_t kLeadToWin = 4;
constexpr std::ptrdiff_t kLeadToLose = 2;
constexpr size_t kMaxComparisons = 11;
constexpr int64_t kFactor = 4;
constexpr int64_t kSmallestLimit = 256 << 10;
constexpr int64_t kLargestLimit = int64_t{4} << 30;
constexpr double kShortestWait = 0.00025;
constexpr double kLongestWait = 0.004;

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

int64_t power_of_two_up_to(int64_t number) {
  int64_t power = 1;
  while (power <= number / 2) power *= 2;
  return power;
}

std::string percent(double ratio) {
  char text[32];
  snprintf(text, sizeof text, "%+.1f %%", (ratio - 1) * 100);
  return text;
}

}  // namespace

Search::Search(const SearchOptions& options) : options_(options), best_(options.start) {}

double Search::best_score() const { return median(best_scores_); }

// Limits that no batch reaches are equivalent: smaller candidates begin below the largest batch, and larger ones are
// tried only if the limit has cut batches.
bool Search::propose() {
  candidate_ = best_;
  switch (move_) {
    case Move::kSmallerBatches:
      candidate_.fusion_threshold = power_of_two_up_to(std::min(best_.fusion_threshold, largest_batch_) / kFactor);
      return options_.fusion_threshold && candidate_.fusion_threshold >= kSmallestLimit;
    case Move::kLargerBatches:
      if (best_.fusion_threshold > kLargestLimit / kFactor) return false;
      candidate_.fusion_threshold = best_.fusion_threshold * kFactor;
      return options_.fusion_threshold && largest_batch_ > best_.fusion_threshold / 2;
    case Move::kLongerWait:
      candidate_.cycle_time = best_.cycle_time > 0 ? best_.cycle_time * kFactor : kShortestWait;
      return options_.cycle_time && candidate_.cycle_time <= kLongestWait;
    case Move::kNone: break;
  }
  return false;
}

// Goes to the next move: the current one has no candidate left, or its candidate has been given up.
void Search::next_move() {
  // A search that came from larger batches does not go back.
  const bool came_from_larger = move_ == Move::kSmallerBatches && has_helped_;
  move_ = came_from_larger ? Move::kLongerWait : static_cast<Move>(static_cast<int>(move_) + 1);
  has_helped_ = false;
}

void Search::find_candidate() {
  candidate_scores_.clear();
  ratios_.clear();
  while (!is_done() && !propose()) next_move();
  has_candidate_ = !is_done();
}

std::string Search::on_sample(const Sample& sample) {
  largest_batch_ = std::max(largest_batch_, sample.largest_batch);
  if (options_.warmup_samples > 0) {
    --options_.warmup_samples;
    return "warm-up";
  }
  if (is_trying_) {
    is_trying_ = false;
    candidate_scores_.push_back(sample.score());
    ratios_.push_back(sample.score() / best_scores_.back());
    return judge();
  }
  best_scores_.push_back(sample.score());
  if (!has_candidate_) find_candidate();
  is_trying_ = has_candidate_;
  return is_trying_ ? "the best so far" : "there is nothing else to try";
}

std::string Search::judge() {
  const auto num_won = std::count_if(ratios_.begin(), ratios_.end(), [](double ratio) { return ratio >= kMargin; });
  const std::ptrdiff_t lead = 2 * num_won - static_cast<std::ptrdiff_t>(ratios_.size());
  const std::string compared = percent(ratios_.back()) + " against the best so far";
  if (lead >= kLeadToWin) {
    gain_ *= median(ratios_);
    best_ = candidate_;
    best_scores_ = std::move(candidate_scores_);
    has_helped_ = true;
    find_candidate();
    return compared + ": takes its place";
  }
  if (lead <= -kLeadToLose || ratios_.size() >= kMaxComparisons) {
    next_move();
    find_candidate();
    return compared + ": given up";
  }
  return compared;
}

}  // namespace hvl
