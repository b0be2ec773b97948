// The time in which requests of this rank waited while no collective was executed, and the time in which collectives
// were executed.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace hvl {

// The counters are shared by threads without a lock. Each function stores the end of a time before it adds that time,
// and read() loads in the opposite order, so that no time counts twice.
class TimeShares {
 public:
  struct Sums {
    int64_t waiting = 0;        // nanoseconds
    int64_t communicating = 0;  // nanoseconds
  };

  // Any thread: a request is enqueued, or was refused after that.
  void enqueue(uint64_t now) {
    if (num_enqueued_.load() == num_completed_.load()) pending_since_.store(now);
    num_enqueued_.fetch_add(1);
  }
  void withdraw() { num_enqueued_.fetch_sub(1); }

  // Only the holder of the engine lock may call the rest, except read().
  void complete() { num_completed_.store(num_completed_.load(std::memory_order_relaxed) + 1); }
  void begin(uint64_t now) {
    const uint64_t since = std::max(pending_since_.load(), idle_since_.load());
    now = std::max(now, idle_since_.load());  // several collectives begin when their records have been read
    begun_at_.store(now, std::memory_order_release);
    add(&waiting_, since, now);
  }
  void end(uint64_t now) {
    const uint64_t begun = begun_at_.load();
    idle_since_.store(now, std::memory_order_release);
    begun_at_.store(0, std::memory_order_release);
    add(&communicating_, begun, now);
  }

  // Any thread: requests that are enqueued and not complete.
  int64_t in_flight() const {
    const uint64_t num_completed = num_completed_.load();
    return std::max<int64_t>(0, static_cast<int64_t>(num_enqueued_.load() - num_completed));
  }
  // Any thread: the sums up to now, with the time that still runs. Neither ever falls.
  Sums read(uint64_t now) {
    Sums sums{waiting_.load(), communicating_.load()};
    const uint64_t begun = begun_at_.load();
    const uint64_t since = std::max(pending_since_.load(), idle_since_.load());
    if (begun != 0) {
      sums.communicating += length(begun, now);
    } else if (num_completed_.load() != num_enqueued_.load()) {
      sums.waiting += length(since, now);
    }
    return {raise(&shown_waiting_, sums.waiting), raise(&shown_communicating_, sums.communicating)};
  }

 private:
  static int64_t length(uint64_t from, uint64_t to) { return to > from ? static_cast<int64_t>(to - from) : 0; }
  static void add(std::atomic<int64_t>* sum, uint64_t from, uint64_t to) {  // it has one writer
    sum->store(sum->load(std::memory_order_relaxed) + length(from, to), std::memory_order_release);
  }
  static int64_t raise(std::atomic<int64_t>* shown, int64_t value) {
    int64_t before = shown->load();
    while (before < value && !shown->compare_exchange_weak(before, value)) {
    }
    return std::max(before, value);
  }

  std::atomic<uint64_t> num_enqueued_{0};
  std::atomic<uint64_t> num_completed_{0};
  std::atomic<uint64_t> pending_since_{0};  // when the first of those that are not complete was enqueued
  std::atomic<uint64_t> idle_since_{0};     // when the last collective ended
  std::atomic<uint64_t> begun_at_{0};       // start of the collective that is executed; 0: none is
  std::atomic<int64_t> waiting_{0};
  std::atomic<int64_t> communicating_{0};
  std::atomic<int64_t> shown_waiting_{0};
  std::atomic<int64_t> shown_communicating_{0};
};

}  // namespace hvl
