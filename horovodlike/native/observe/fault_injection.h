// Faults that a rank injects into itself at a given point, for tests of the effect on other ranks.
//
// An armed fault triggers once, when the engine next reaches that point. If none is armed, the check costs one relaxed
// load for each batch, or each set of new requests.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <utility>

#include "hvl.h"

namespace hvl {

using FaultAction = std::function<void()>;

class Fault {
 public:
  // Any thread. Replaces the fault that was armed before; null: removes it.
  void arm(FaultAction trigger) {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_armed_.store(trigger != nullptr, std::memory_order_relaxed);
    trigger_ = std::move(trigger);
  }

  bool is_armed() const { return is_armed_.load(std::memory_order_relaxed); }

  // Only the holder of the engine lock may call it. An exception that the fault throws breaks the job.
  void trigger() {
    FaultAction armed;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_armed_.store(false, std::memory_order_relaxed);
      armed = std::exchange(trigger_, nullptr);
    }
    if (armed != nullptr) armed();
  }

 private:
  std::mutex mutex_;  // a leaf lock; guards trigger_
  std::atomic<bool> is_armed_{false};
  FaultAction trigger_;
};

// `amount`: the number of a signal, or seconds. Returns null if there is no such fault.
FaultAction make_trigger(hvl_fault fault, double amount);
// Shuts down all TCP connections of this process, as if the network were gone: its descriptors stay open.
void cut_connections();

}  // namespace hvl
