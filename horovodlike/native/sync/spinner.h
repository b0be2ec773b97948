// Spinning, before the thread that does the engine's work sleeps: for how long, and whether it yields meanwhile.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "shm/host_memory.h"

namespace hvl {

// Waking a thread takes 5 to 50 us, so spinning that long pays off when a thread waits for a result. If spinning keeps
// an awaited rank from running, the limit is halved, down to the lazy one, until each has its own processor again.
constexpr uint64_t kUrgentSpin = 200 * kMicrosecond;
constexpr uint64_t kLazySpin = 2 * kMicrosecond;

enum class Spin { kInVain, kNotNeeded, kWorthIt };

// Spins until `condition` holds, at most `limit` nanoseconds; adds the time that it took to `spent`, to the nearest
// reading of the clock.
//
// If it yields, other runnable threads have the processor now and then. If there is a processor for every thread, not
// yielding is better: two threads that yield to each other stay on one processor, whereas a sleeping thread is woken on
// a free one.
template <typename Condition>
Spin spin_until(Condition&& condition, uint64_t limit, bool yields, uint64_t* spent) {
  constexpr int kLooks = 16;  // between two readings of the clock
  uint64_t start = 0;
  uint64_t now = 0;
  for (;;) {
    for (int look = 0; look < kLooks; ++look) {
      if (condition()) {
        *spent += now - start;
        return start == 0 ? Spin::kNotNeeded : Spin::kWorthIt;
      }
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    now = now_ns();
    if (start == 0) start = now;
    if (now - start >= limit) {
      *spent += now - start;
      return Spin::kInVain;
    }
    if (yields) sched_yield();
  }
}

// Only the thread that holds the engine lock may use it.
class Spinner {
 public:
  // `processors`: available to all ranks of this host together.
  Spinner(HostMemory* memory, int local_rank, int processors)
      : memory_(*memory), local_rank_(local_rank), crowded_(memory->shape().ranks > processors) {}

  // A thread of this process waits for a result: spinning is the best use of the processor.
  void set_urgent(bool urgent) { urgent_ = urgent; }

  // Spins briefly; true if `condition` holds. Adds the time that it took to `spent`.
  template <typename Condition>
  bool spin(Condition&& condition, uint64_t* spent) {
    show_processor();
    const Spin result = spin_until(condition, urgent_ ? limit_ : kLazySpin, crowded_, spent);
    if (result == Spin::kWorthIt) limit_ = std::min(2 * limit_, kUrgentSpin);
    return result != Spin::kInVain;
  }
  // As spin(), for up to `limit` nanoseconds if it is urgent: for a condition that is polled afterwards.
  template <typename Condition>
  bool spin_for(uint64_t limit, Condition&& condition) {
    uint64_t ignored = 0;
    return spin_until(condition, urgent_ ? limit : kLazySpin, crowded_, &ignored) != Spin::kInVain;
  }

  // After a sleep: halves the limit if another rank ran on the processor on which this thread was spinning, else
  // doubles it.
  void adapt() {
    const int mine = memory_.rank(local_rank_).processor.load(std::memory_order_relaxed);
    bool shared = false;
    for (int peer = 0; peer < memory_.shape().ranks && !shared; ++peer) {
      shared = peer != local_rank_ && memory_.rank(peer).processor.load(std::memory_order_relaxed) == mine;
    }
    limit_ = shared ? std::max(limit_ / 2, kLazySpin) : std::min(2 * limit_, kUrgentSpin);
  }

 private:
  void show_processor() {
    std::atomic<int>& shown = memory_.rank(local_rank_).processor;
    const int processor = sched_getcpu() + 1;
    if (shown.load(std::memory_order_relaxed) != processor) shown.store(processor, std::memory_order_relaxed);
  }

  HostMemory& memory_;
  const int local_rank_;
  const bool crowded_;  // more ranks than processors
  bool urgent_ = false;
  uint64_t limit_ = kUrgentSpin;
};

}  // namespace hvl
