// The timeline of a rank: its collectives over time, as trace events that Chrome and Perfetto show.
//
// In the trace each tensor is a process and the rank a thread of it, so that the files of all ranks can be merged. The
// file is a complete JSON array at any time. While the timeline is off, a batch costs two relaxed loads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "queue/operation.h"

namespace hvl {

class Timeline {
 public:
  Timeline(int rank, int size) : place_{rank, size} {}
  ~Timeline() { stop(); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Any thread. Stops the current timeline first, if there is one. `mark_cycles`: also mark the start of each batch.
  Status start(const std::string& path, bool mark_cycles);
  // Any thread. Returns when all events are in the file.
  void stop();

  // The holder of the engine lock calls begin() and end() for each collective. `number`: the collective's place in the
  // log; `num_ranks`: the ranks that take part.
  void begin(const std::vector<NamedTensor*>& tensors, uint64_t number, int num_ranks, uint64_t now) {
    if (is_on_.load(std::memory_order_relaxed)) add_begin(tensors, number, num_ranks, now);
  }
  void end(uint64_t now) {
    if (is_on_.load(std::memory_order_relaxed)) add_end(now);
  }

 private:
  struct Place {
    int rank;
    int size;  // ranks in the job
  };

  // An event that has begun.
  struct Open {
    int row = 0;
    std::string text;  // the event without its times
    uint64_t begun = 0;
  };

  void add_begin(const std::vector<NamedTensor*>& tensors, uint64_t number, int num_ranks, uint64_t now);
  void add_end(uint64_t now);
  // mutex_ is held.
  void end_open(uint64_t now);
  void add(std::string event);
  void add_span(const std::string& what, int row, uint64_t begun, uint64_t ended);
  int row_of(const std::string& name);
  std::string time_of(uint64_t time) const;
  // Only the writer's thread calls it.
  void write_on();
  void write(const std::string& events);

  const Place place_;
  std::atomic<bool> is_on_{false};
  std::mutex control_;  // start() and stop(); taken before mutex_
  std::thread writer_;  // guarded by control_
  int file_ = -1;       // used by the writer while it runs
  int64_t written_ = 0;

  std::mutex mutex_;  // a leaf lock; guards the members below
  std::condition_variable wakes_;
  bool stopping_ = false;
  bool mark_cycles_ = false;
  uint64_t started_ = 0;
  std::string events_;  // not in the file yet
  int64_t num_dropped_ = 0;
  std::unordered_map<std::string, int> rows_;  // by name
  std::vector<Open> open_;
};

}  // namespace hvl
