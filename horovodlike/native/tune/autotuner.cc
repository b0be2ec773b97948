#include "tune/autotuner.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/log.h"

namespace hvl {

namespace {

// A phase whose batches are all smaller is not training: it reduces a metric, and shows nothing about limits or waits.
constexpr int64_t kSmallestTrainingBatch = 64 << 10;

std::string text_of(const Tuned& tuned) {
  char cycle_time[32];
  snprintf(cycle_time, sizeof cycle_time, "%g", tuned.cycle_time * 1000);
  return "HOROVODLIKE_FUSION_THRESHOLD=" + std::to_string(tuned.fusion_threshold) +
         " HOROVODLIKE_CYCLE_TIME=" + cycle_time;
}

}  // namespace

Autotuner::Autotuner(const AutotuneOptions& options, const Tuned& start)
    : start_(start),
      sampler_(options.steps_per_sample),
      search_(SearchOptions{start, options.fusion_threshold, options.cycle_time, options.warmup_samples}) {
  if (!options.log.empty()) open_log(options.log);
}

void Autotuner::open_log(const std::string& path) {
  log_.open(path);
  if (log_.is_open()) {
    log_ << "sample,cycle_time_ms,tensor_fusion_threshold,score,reason" << std::endl;
    return;
  }
  log(LogLevel::kWarning, "cannot write the log of autotuning, HOROVODLIKE_AUTOTUNE_LOG='" + path +
                              "': " + strerror(errno) + "; the search goes on without it");
}

// Flushes each row, for users that follow the file.
void Autotuner::write_row(const Tuned& tuned, double score, const std::string& reason) {
  if (!log_.is_open()) return;
  log_ << num_samples_ << ',' << tuned.cycle_time * 1000 << ',' << tuned.fusion_threshold << ',' << score << ','
       << reason << std::endl;
  if (log_) return;
  log(LogLevel::kWarning, "cannot write the log of autotuning any more; the search goes on without it");
  log_.close();
}

bool Autotuner::on_batch(const std::vector<uint64_t>& tensors, int64_t num_bytes, uint64_t now) {
  Sample sample;
  if (is_done() || !sampler_.on_batch(tensors, num_bytes, now, &sample)) return false;
  const Tuned before = current();
  ++num_samples_;
  if (sample.largest_batch < kSmallestTrainingBatch) {
    write_row(before, sample.score(), "too small to tell");
    return false;
  }
  const std::string reason = search_.on_sample(sample);
  write_row(before, sample.score(), reason);
  if (is_done()) conclude();
  return is_done() || current() != before;
}

void Autotuner::conclude() {
  const Tuned& best = search_.best();
  write_row(best, search_.best_score(), "chosen");
  log_.close();
  const std::string samples = " after " + std::to_string(num_samples_) + " samples";
  if (best == start_) {
    tell("autotuning has found nothing better than " + text_of(best) + samples + "; these stay.");
    return;
  }
  char gain[32];
  snprintf(gain, sizeof gain, "%.1f %%", (search_.gain() - 1) * 100);
  tell("autotuning has chosen " + text_of(best) + samples + ": " + gain + " more bytes per second than with " +
       text_of(start_) + ". Set them to have them from the first step on.");
}

void Autotuner::stop() {
  if (is_done()) return;
  const std::string remedy =
      num_samples_ == 0
          ? "A step is seen by a tensor that is reduced again under the same name, and there were too few of them."
          : "Let the job run longer, or lower HOROVODLIKE_AUTOTUNE_STEPS_PER_SAMPLE.";
  tell("autotuning was not done after " + std::to_string(num_samples_) +
       " samples, when the job ended. The best so far: " + text_of(search_.best()) + ". " + remedy);
}

}  // namespace hvl
