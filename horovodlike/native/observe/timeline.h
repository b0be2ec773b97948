// The timeline of a rank: its collectives over time, as trace events that Chrome and Perfetto show.
//
// Each tensor is a process of the trace and the rank its thread, so that the files of all ranks can be laid over each
// other. The file is a whole JSON array whenever it is looked at. While it is off, a batch costs one relaxed load.
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
  explicit Timeline(int rank) : rank_(rank) {}
  ~Timeline() { stop(); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Any thread. Ends the timeline that was being written, if there is one. `mark_cycles`: also where batches begin.
  Status start(const std::string& path, bool mark_cycles);
  // Any thread. Returns when all is in the file.
  void stop();

  // For the holder of the engine lock: the collective number `number` of these tensors begins, and ends.
  void begin(const std::vector<NamedTensor*>& tensors, uint64_t number, uint64_t now) {
    if (is_on_.load(std::memory_order_relaxed)) add_begin(tensors, number, now);
  }
  void end(uint64_t now) {
    if (is_on_.load(std::memory_order_relaxed)) add_end(now);
  }

 private:
  // An event that has begun.
  struct Open {
    int row = 0;
    std::string text;  // but for the time
    uint64_t begun = 0;
  };

  void add_begin(const std::vector<NamedTensor*>& tensors, uint64_t number, uint64_t now);
  void add_end(uint64_t now);
  // mutex_ is held.
  void end_open(uint64_t now);
  void add(std::string event);
  void add_span(const std::string& what, int row, uint64_t begun, uint64_t ended);
  int row_of(const std::string& name);
  std::string time_of(uint64_t time) const;
  // The writer's thread.
  void write_on();
  void write(const std::string& events);

  const int rank_;
  std::atomic<bool> is_on_{false};
  std::mutex control_;  // start() and stop(); taken before mutex_
  std::thread writer_;  // control_
  int file_ = -1;       // the writer's while it runs
  int64_t written_ = 0;

  std::mutex mutex_;  // a leaf; guards the members below
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
