#include "engine/tuning_observer.h"

#include <functional>

#include "base/log.h"

namespace hvl {

namespace {

// Null: no value is tuned.
std::unique_ptr<Autotuner> make_autotuner(const EngineOptions& options) {
  AutotuneOptions autotune = options.autotune;
  if (!autotune.enabled || options.rank != 0) return nullptr;
  autotune.cycle_time &= options.overlap;  // elsewhere no collective begins before a thread waits for it
  if (options.size == 1) {
    log(LogLevel::kWarning, "autotuning has nothing to do: a job of one rank has no batches");
    return nullptr;
  }
  if (!autotune.fusion_threshold && !autotune.cycle_time) {
    log(LogLevel::kWarning,
        std::string("autotuning has nothing to do: HOROVODLIKE_FUSION_THRESHOLD is set, and HOROVODLIKE_CYCLE_TIME ") +
            (options.overlap ? "is, too" : "matters only to ranks that overlap") + "; what is set is not tuned");
    return nullptr;
  }
  return std::make_unique<Autotuner>(autotune, Tuned{options.fusion_threshold, options.cycle_time});
}

}  // namespace

TuningObserver::TuningObserver(EngineContext* context)
    : context_(*context),
      autotuner_(make_autotuner(context->options)),
      cycle_time_(to_ns(context->options.cycle_time)) {}

void TuningObserver::tune(const Collective& collective) {
  tensors_.clear();
  int64_t num_bytes = 0;
  for (const NamedTensor* tensor : collective.tensors) {
    tensors_.push_back(std::hash<std::string>()(tensor->key));
    num_bytes += tensor->entry->operation->total_bytes;
  }
  if (!autotuner_->on_batch(tensors_, num_bytes, collective.begun_at)) return;
  context_.control->set_fusion_threshold(autotuner_->current().fusion_threshold);
  cycle_time_ = to_ns(autotuner_->current().cycle_time);
  if (autotuner_->is_done()) autotuner_ = nullptr;
}

}  // namespace hvl
