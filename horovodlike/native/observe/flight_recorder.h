// The last collectives of a rank, which tell afterwards what it was doing.
//
// One thread writes (the holder of the engine lock), any thread reads at any time, without a lock: a slot's version is
// odd while it is written, and a reader skips a slot that changed while it read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/types.h"

namespace hvl {

// One collective. Times are now_ns() times.
struct CollectiveRecord {
  uint64_t number = 0;  // of the log's collectives, the same on all ranks
  uint64_t enqueued_at = 0;
  uint64_t begun_at = 0;
  uint64_t ended_at = 0;  // 0: it has not
  int64_t num_bytes = 0;
  Kind kind = HVL_ALLREDUCE;
  int32_t process_set = 0;
  int32_t num_requests = 0;
  char name[68] = {};  // of the first request, cut to the room there is

  void set_name(const std::string& text);
};

class FlightRecorder {
 public:
  explicit FlightRecorder(size_t capacity);

  // The one writer. Neither takes memory.
  void begin(const CollectiveRecord& record);
  void end(uint64_t now);
  // Any thread: all records, the oldest first.
  std::vector<CollectiveRecord> read() const;

 private:
  static constexpr size_t kWords = sizeof(CollectiveRecord) / sizeof(uint64_t);
  static_assert(sizeof(CollectiveRecord) % sizeof(uint64_t) == 0);

  struct Slot {
    std::atomic<uint64_t> version{0};
    std::atomic<uint64_t> words[kWords] = {};
  };

  void write(Slot* slot);

  const size_t capacity_;
  std::unique_ptr<Slot[]> slots_;
  std::atomic<uint64_t> num_begun_{0};
  CollectiveRecord current_;  // the writer's
};

// A JSON array of objects; times in seconds since the epoch, `null` for a collective that has not ended.
std::string to_json(const std::vector<CollectiveRecord>& records);

}  // namespace hvl
