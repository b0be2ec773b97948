// The search for the best values: decides the next measurement. No clock and no randomness: the same scores lead to the
// same answer.
//
// One value at a time is changed by a factor of 4, in one direction, as long as that helps. A candidate is compared
// with the best values so far in turn: one sample of the best, one of the candidate. So a temporary slowdown of the job
// affects both. The candidate wins a comparison if its score is better by kMargin. It replaces the best when it has won
// four comparisons more than it has lost; it is dropped when it has lost two more than it has won, or after 11. So one
// sample that a pause has spoilt decides nothing, the job keeps its values where there is no difference, and the search
// takes more samples where they are noisy.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tune/sampler.h"

namespace hvl {

// The values that are tuned while a job runs. The results are bitwise equal for all values.
struct Tuned {
  int64_t fusion_threshold = 128 << 20;  // bytes of a batch at most
  double cycle_time = 0;                 // seconds that rank 0, and so all ranks, wait for more requests

  bool operator==(const Tuned& other) const {
    return fusion_threshold == other.fusion_threshold && cycle_time == other.cycle_time;
  }
  bool operator!=(const Tuned& other) const { return !(*this == other); }
};

struct SearchOptions {
  Tuned start;
  bool fusion_threshold = true;  // whether it is tuned
  bool cycle_time = true;        // likewise
  int warmup_samples = 3;        // the first ones, which do not count
};

class Search {
 public:
  static constexpr double kMargin = 1.03;

  explicit Search(const SearchOptions& options);

  // The values for the next sample; when the search is done, the best ones.
  const Tuned& current() const { return is_trying_ ? candidate_ : best_; }
  // Takes a sample that was measured with current(). Returns the outcome in words without a comma.
  std::string on_sample(const Sample& sample);

  bool is_done() const { return move_ == Move::kNone; }
  const Tuned& best() const { return best_; }
  double best_score() const;             // the median; 0 without a sample that counts
  double gain() const { return gain_; }  // best score divided by the start's score; 1 if the start's is the best

 private:
  enum class Move { kSmallerBatches, kLargerBatches, kLongerWait, kNone };

  bool propose();  // a candidate for the current move
  void next_move();
  void find_candidate();
  std::string judge();

  SearchOptions options_;
  Tuned best_;
  Tuned candidate_;
  bool has_candidate_ = false;
  bool is_trying_ = false;  // the next sample is the candidate's
  Move move_ = Move::kSmallerBatches;
  bool has_helped_ = false;  // the current move
  int64_t largest_batch_ = 0;
  std::vector<double> best_scores_;
  std::vector<double> candidate_scores_;
  std::vector<double> ratios_;  // candidate to best, of each comparison
  double gain_ = 1;
};

}  // namespace hvl
