// The ring buffers of one host, for its leader (local rank 0): it receives the others' requests, and sends the log.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "negotiate/message.h"
#include "negotiate/straggler_stats.h"
#include "shm/host_memory.h"
#include "shm/ring_buffer.h"

namespace hvl {

class LeaderRings {
 public:
  explicit LeaderRings(std::shared_ptr<HostMemory> memory);

  // Takes a message; `sent`: the time of sending, by the host's clock.
  using Accept = std::function<Status(int local_rank, const Message& message, uint64_t sent)>;
  // Passes on all messages that have arrived; sets *progressed if there were any.
  Status receive(const Accept& accept, bool* progressed);

  // Appends a record to the log; pump() passes it on. `concerned`: local ranks that must act on it; empty: all.
  void publish(Record record, const std::vector<int>& concerned);
  // Sets *progressed if anything was passed on.
  void pump(bool* progressed);
  // The next record that the leader itself runs, once the host's other ranks can read it, too: a leader that runs a
  // collective does not pass on the log, so the other ranks would never begin.
  bool has_next() const { return !own_.empty() && log_.has_written(own_.front().end); }
  bool next(Record* record);
  bool is_flushed() const { return log_.is_flushed(); }
  // True if receive() or pump() would do something.
  bool has_news() const;

  // Publishes to the host how long others have waited for its ranks. `ranks`: the index in `stats` of each local rank.
  void show(const std::vector<StragglerStats>& stats, const std::vector<int>& ranks);
  // Publishes to the host that the coordinator asks about missing ranks; see HostHeader.
  void show_inquiry() { memory_->header().inquiries.fetch_add(1, std::memory_order_relaxed); }

 private:
  struct Published {
    Record record;
    uint64_t end;  // in the stream of the ring buffer
  };

  void notify_readers();

  std::shared_ptr<HostMemory> memory_;
  RingBufferWriter log_;
  std::deque<Published> own_;  // records that the leader has not run yet
  // The ranks to wake for the written records; and the bytes written since all ranks were woken.
  std::vector<bool> concerned_;  // by local rank
  uint64_t unheard_ = 0;
  std::vector<RingBufferReader> requests_;  // of local ranks 1, 2, ...
  std::string frame_;
  Message message_;
};

}  // namespace hvl
