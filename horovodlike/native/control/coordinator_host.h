// The environment of the coordinator on the rank that holds it, independent of the transport of messages and log.
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "control/control_plane.h"
#include "negotiate/coordinator.h"
#include "negotiate/stall_inspector.h"
#include "observe/stack_dump.h"

namespace hvl {

struct CoordinatorHostOptions {
  CoordinatorOptions coordinator;
  double stall_warning = 60;
  double stall_shutdown = 0;
};

class CoordinatorHost {
 public:
  explicit CoordinatorHost(const CoordinatorHostOptions& options)
      : coordinator_(options.coordinator), inspector_(options.stall_warning, options.stall_shutdown) {}

  // `sent`: the time of sending, by the host's clock.
  Status accept(int rank, const Message& message, uint64_t sent);
  // A message for all the ranks that it names; `came`: its time of arrival, by the host's clock.
  Status accept(const Message& message, uint64_t came);
  // Decides; passes every decision to `publish`, then keeps its record for this rank.
  void decide(const std::function<void(const Decision&)>& publish);
  bool next(Record* record);
  void set_fusion_threshold(int64_t num_bytes) { coordinator_.set_fusion_threshold(num_bytes); }
  const std::vector<StragglerStats>& lateness() const { return coordinator_.lateness(); }
  bool has_messages() const { return accepted_; }
  bool has_records() const { return !log_.empty(); }
  // Requests stack dumps of ranks that others have waited for too long; a later call, when they have answered, reports.
  // Never waits. Calls show_inquiry() while it asks about a tensor whose time is over.
  Status check_stalls(StackDumpRequests* questions, const std::function<void()>& show_inquiry);

 private:
  Coordinator coordinator_;
  StallInspector inspector_;
  StallVerdict verdict_;  // about which the missing ranks were asked; without a warning: none was asked
  std::vector<Decision> decisions_;
  std::deque<Record> log_;  // records that this rank has still to run
  bool accepted_ = false;   // messages came since the last decision
};

}  // namespace hvl
