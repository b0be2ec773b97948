// Passes the batches of rank 0 to the autotuner, and applies the values that it chooses. An autotuner on rank 0 is
// enough: the coordinator there limits the batches of all ranks, and no tensor is reduced before rank 0 has announced
// it. Only the holder of the engine lock may use it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/log.h"
#include "engine/collective_reporter.h"

namespace hvl {

// Returns null if no value is tuned.
inline std::unique_ptr<Autotuner> make_autotuner(const EngineOptions& options) {
  AutotuneOptions autotune = options.autotune;
  if (!autotune.enabled || options.rank != 0) return nullptr;
  autotune.cycle_time &= options.overlap;  // without overlap collectives begin only when a thread waits
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

class TuningObserver {
 public:
  explicit TuningObserver(EngineContext* context)
      : context_(*context),
        autotuner_(make_autotuner(context->options)),
        cycle_time_(to_ns(context->options.cycle_time)) {}

  uint64_t cycle_time() const { return cycle_time_; }
  // Measures an allreduce that begins; other collectives are not fused.
  void on_allreduce(const Collective& collective) {
    if (autotuner_ != nullptr) tune(collective);
  }
  // Ends the search, as the job ends.
  void stop() {
    if (autotuner_ != nullptr) autotuner_->stop();
  }

 private:
  void tune(const Collective& collective) {
    tensors_.clear();
    int64_t num_bytes = 0;
    for (const NamedTensor* tensor : collective.tensors) {
      tensors_.push_back(std::hash<std::string>()(tensor->key));
      num_bytes += tensor->request->operation->total_bytes;
    }
    if (!autotuner_->on_batch(tensors_, num_bytes, collective.begun_at)) return;
    context_.control->set_fusion_threshold(autotuner_->current().fusion_threshold);
    cycle_time_ = to_ns(autotuner_->current().cycle_time);
    if (autotuner_->is_done()) autotuner_ = nullptr;
  }

  EngineContext& context_;
  std::unique_ptr<Autotuner> autotuner_;  // null: off, or done
  std::vector<uint64_t> tensors_;         // hashes of the names in a batch; a member to reuse its memory
  uint64_t cycle_time_;
};

}  // namespace hvl
