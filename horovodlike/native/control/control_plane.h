// The control plane as a rank's engine sees it: requests go up, the log comes down.
#pragma once

#include "negotiate/message.h"

namespace hvl {

// Only the engine uses it, one thread at a time. An error means that the job is broken.
class ControlPlane {
 public:
  virtual ~ControlPlane() = default;

  // Queues a message for the coordinator.
  virtual Status send(const Message& message) = 0;
  // Moves as much as possible without waiting; sets *progressed if anything moved.
  virtual Status pump(bool* progressed) = 0;
  // Returns the next record of the log in *record; *found: there is one.
  virtual Status next(Record* record, bool* found) = 0;
  // True if pump() or next() would find something: the condition under which an engine does not sleep.
  virtual bool has_news() = 0;
  // The time at which pump() has something to do even if nothing has arrived (now_ns() clock).
  virtual uint64_t next_deadline() const { return UINT64_MAX; }
  // True if everything that was sent has left this rank.
  virtual bool is_flushed() = 0;
  // Called when the log has ended: nothing more is sent. is_flushed() then means that the peers have finished, too.
  virtual void finish() {}
  // Called periodically while a collective is under way, and does not wait. An error: another host has broken the job.
  virtual Status check_other_hosts() { return Status(); }
  // Called when the job is broken: sends the reason to the other hosts.
  virtual void tell_broken(const std::string&) {}
  // Reports tensors that some ranks wait for; called a few times a second, and does not wait.
  virtual Status check_stalls() = 0;
  // Called in a forked child, as the last call there: closes the child's copies of the connections. As long as they are
  // open, no peer notices when the parent ends.
  virtual void close_in_child() {}
  // Sets the most bytes of a batch, for later decisions. On the coordinator's rank only.
  virtual void set_fusion_threshold(int64_t) {}
};

}  // namespace hvl
