// The part of the engine that has its values tuned: on rank 0, which alone knows them. The coordinator there bounds the
// batches of all ranks, and nothing is reduced before rank 0 has announced it.

#include <functional>
#include <memory>

#include "base/log.h"
#include "engine/engine.h"

namespace hvl {

std::unique_ptr<Autotuner> Engine::make_autotuner(const EngineOptions& options) {
  AutotuneOptions autotune = options.autotune;
  if (!autotune.enabled || options.rank != 0) return nullptr;
  autotune.cycle_time &= options.overlap;  // elsewhere nothing begins that nobody waits for
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

// An allreduce has begun; the others are not fused.
void Engine::tune() {
  tuned_tensors_.clear();
  int64_t num_bytes = 0;
  for (const NamedTensor* tensor : tensors_) {
    tuned_tensors_.push_back(std::hash<std::string>()(tensor->key));
    num_bytes += tensor->entry->operation->total_bytes;
  }
  if (!autotuner_->on_batch(tuned_tensors_, num_bytes, begun_)) return;
  control_->set_fusion_threshold(autotuner_->current().fusion_threshold);
  cycle_time_ = to_ns(autotuner_->current().cycle_time);
  if (autotuner_->is_done()) autotuner_ = nullptr;
}

}  // namespace hvl
