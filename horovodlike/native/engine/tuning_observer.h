// Tunes the engine's values from the batches that it sees, on rank 0, which alone knows them. The coordinator there
// bounds the batches of all ranks, and nothing is reduced before rank 0 has announced it. For the holder of the engine
// lock.
#pragma once

#include <memory>
#include <vector>

#include "engine/collective_reporter.h"

namespace hvl {

class TuningObserver {
 public:
  explicit TuningObserver(EngineContext* context);

  uint64_t cycle_time() const { return cycle_time_; }
  // An allreduce begins; other collectives are not fused.
  void on_allreduce(const Collective& collective) {
    if (autotuner_ != nullptr) tune(collective);
  }
  // The job ends.
  void stop() {
    if (autotuner_ != nullptr) autotuner_->stop();
  }

 private:
  void tune(const Collective& collective);

  EngineContext& context_;
  std::unique_ptr<Autotuner> autotuner_;  // null: off, or done
  std::vector<uint64_t> tensors_;         // of a batch; kept for its memory
  uint64_t cycle_time_;
};

}  // namespace hvl
