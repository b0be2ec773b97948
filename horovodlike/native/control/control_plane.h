// The control plane as a rank's engine sees it: requests go up, the log comes down.
#pragma once

#include "negotiate/message.h"

namespace hvl {

// For the engine only: one thread at a time. An error means that the job is broken.
class ControlPlane {
 public:
  virtual ~ControlPlane() = default;

  // Queues a message for the coordinator.
  virtual Status send(const Message& message) = 0;
  // Moves as much as possible without waiting; sets *progressed if anything moved.
  virtual Status pump(bool* progressed) = 0;
  // The next record of the log, if one is here.
  virtual Status next(Record* record, bool* found) = 0;
  // True if pump() or next() would find something: the condition under which an engine does not sleep.
  virtual bool has_news() = 0;
  // The time at which pump() has something to do even if nothing has arrived (now_ns() clock).
  virtual uint64_t next_deadline() const { return UINT64_MAX; }
  // True if everything that was sent has left this rank.
  virtual bool is_flushed() = 0;
  // The log has ended: nothing is sent from now on. is_flushed() then means that the other hosts know it, too.
  virtual void finish() {}
  // Called now and then while a collective is under way, and does not wait. An error: the job is broken elsewhere.
  virtual Status check_other_hosts() { return Status(); }
  // The job is broken here: tells the other hosts why.
  virtual void tell_broken(const std::string&) {}
  // Reports tensors that some ranks wait for; called a few times a second, and does not wait.
  virtual Status check_stalls() = 0;
  // In a child process that the framework has forked, and the last call there: closes its copies of connections. While
  // they are open, no peer sees that the parent process has ended, as long as the child lives.
  virtual void close_in_child() {}
  // The most bytes of a batch, for decisions from now on. On the coordinator's rank only.
  virtual void set_fusion_threshold(int64_t) {}
};

}  // namespace hvl
