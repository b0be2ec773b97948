// The last collectives of a rank, to show its work after a failure.
//
// One thread writes (the holder of the engine lock). Any thread reads at any time, without a lock: a slot's version is
// odd while the slot is written, and a reader skips a slot that changed during the read. Some collectives are also in a
// sample, which goes back further: for readers that compare the ranks, and do not read them at the same moment.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/types.h"

namespace hvl {

// One collective. Times are now_ns() times.
struct CollectiveRecord {
  uint64_t number = 0;  // its place among the log's collectives, the same on all ranks
  uint64_t enqueued_at = 0;
  uint64_t begun_at = 0;
  uint64_t ended_at = 0;  // 0: it has not ended
  uint64_t pause = 0;     // nanoseconds from the end of the collective before, which is about the same on all ranks
  int64_t num_bytes = 0;
  Kind kind = HVL_ALLREDUCE;
  int32_t process_set = 0;
  int32_t num_requests = 0;
  char name[68] = {};  // the first request's name, truncated to this size

  void set_name(const std::string& text);
};

class FlightRecorder {
 public:
  explicit FlightRecorder(size_t capacity);

  // Only the writer calls begin() and end(). Neither function allocates memory.
  void begin(const CollectiveRecord& record);
  void end(uint64_t now);
  // Any thread: all records, the oldest first.
  std::vector<CollectiveRecord> read() const { return recent_.read(recent_.capacity()); }
  // Any thread. Returns at most `most` collectives with numbers above *after, the oldest first, and sets *after to the
  // number of the last collective. All ranks choose the same ones: collectives after a pause, in which a rank was
  // awaited, and few others, by a hash of the number. The time of their end may be missing.
  std::vector<CollectiveRecord> sample(uint64_t* after, size_t most) const;

 private:
  static constexpr size_t kSampled = 512;

  class Ring {
   public:
    explicit Ring(size_t capacity) : capacity_(capacity), slots_(std::make_unique<Slot[]>(capacity)) {}

    size_t capacity() const { return capacity_; }
    void append(const CollectiveRecord& record);
    void replace_last(const CollectiveRecord& record);
    std::vector<CollectiveRecord> read(size_t most) const;

   private:
    static constexpr size_t kWords = sizeof(CollectiveRecord) / sizeof(uint64_t);
    static_assert(sizeof(CollectiveRecord) % sizeof(uint64_t) == 0);

    struct Slot {
      std::atomic<uint64_t> version{0};
      std::atomic<uint64_t> words[kWords] = {};
    };

    void write(uint64_t index, const CollectiveRecord& record);

    const size_t capacity_;
    std::unique_ptr<Slot[]> slots_;
    std::atomic<uint64_t> num_appended_{0};
  };

  Ring recent_;
  Ring sampled_{kSampled};
  CollectiveRecord current_;  // used by the writer only
};

// Returns a JSON array of objects; times in seconds, `null` for a collective that has not ended.
std::string to_json(const std::vector<CollectiveRecord>& records, const EpochClock& clock = {});

}  // namespace hvl
