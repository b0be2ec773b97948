// The rings of one host as its local rank 0 sees them, the leader: requests of the others come in, the log goes out.
#pragma once

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

  // Takes a message; `sent`: when, by the host's clock.
  using Accept = std::function<Status(int local_rank, const Message& message, uint64_t sent)>;
  // Hands out all that has come; sets *progressed if anything has.
  Status receive(const Accept& accept, bool* progressed);

  // Appends a record to the log; pump() passes it on. `concerned`: local ranks that it makes do something; empty: all.
  // Returns where in the log's stream it ends.
  uint64_t publish(const Record& record, const std::vector<int>& concerned);
  // Sets *progressed if anything was passed on.
  void pump(bool* progressed);
  // All others of the host can read the log up to there.
  bool has_written(uint64_t end) const { return log_.has_written(end); }
  bool is_flushed() const { return log_.is_flushed(); }
  // True if receive() or pump() would do something.
  bool has_news() const;

  // Shows to the host how others have waited for its ranks. `ranks`: by local rank, the index in `lateness`.
  void show(const std::vector<StragglerStats>& lateness, const std::vector<int>& ranks);
  // Shows to the host that the coordinator asks for missing ranks; see HostHeader.
  void show_inquiry() { memory_->header().inquiries.fetch_add(1, std::memory_order_relaxed); }

 private:
  void notify_readers();

  std::shared_ptr<HostMemory> memory_;
  RingBufferWriter log_;
  // Who is to be woken for what has been written; and the bytes written since all were.
  std::vector<bool> concerned_;  // by local rank
  uint64_t unheard_ = 0;
  std::vector<RingBufferReader> requests_;  // of local ranks 1, 2, ...
  std::string frame_;
  Message message_;
};

}  // namespace hvl
