// Runs the coordinator on its rank, independently of how messages and the log are transported. Also the control plane
// of a job of one rank, which needs nothing else.
#pragma once

#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "control/control_plane.h"
#include "negotiate/coordinator.h"
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
  // A message on behalf of all ranks that it names; `came`: its time of arrival, by the host's clock.
  Status accept(const Message& message, uint64_t came);
  // Decides, and passes every decision to `publish`.
  void decide(const std::function<void(Decision&&)>& publish);
  void set_fusion_threshold(int64_t num_bytes) { coordinator_.set_fusion_threshold(num_bytes); }
  const std::vector<StragglerStats>& straggler_stats() const { return coordinator_.straggler_stats(); }
  bool has_messages() const { return accepted_; }
  // Requests stack dumps from ranks that others have waited for too long; a later call reports the stall, with the
  // answers. Never waits. Calls show_inquiry() for each request, and while a tensor has stalled for so long that the
  // job must end. `moved_at`: see HostMemory.
  Status check_stalls(StackDumpRequests* questions, uint64_t moved_at, const std::function<void()>& show_inquiry);

 private:
  Coordinator coordinator_;
  StallInspector inspector_;
  StallVerdict verdict_;  // the stall that stack dumps were requested for; without a warning: none
  std::vector<Decision> decisions_;
  bool accepted_ = false;  // messages have arrived since the last decision
};

class LoopbackControlPlane : public ControlPlane {
 public:
  explicit LoopbackControlPlane(const CoordinatorHostOptions& options) : coordinator_host_(options) {}

  Status send(const Message& message) override { return coordinator_host_.accept(0, message, now_ns()); }
  Status pump(bool*) override {
    coordinator_host_.decide([this](Decision&& decision) { log_.push_back(std::move(decision.record)); });
    return Status();
  }
  Status next(Record* record, bool* found) override;
  bool has_news() override { return coordinator_host_.has_messages() || !log_.empty(); }
  bool is_flushed() override { return true; }
  Status check_stalls() override { return Status(); }

 private:
  CoordinatorHost coordinator_host_;
  std::deque<Record> log_;  // records that this rank has not run yet
};

}  // namespace hvl
