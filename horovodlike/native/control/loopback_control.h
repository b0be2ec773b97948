// The control plane of a job of one rank: only the coordinator.
#pragma once

#include "control/coordinator_host.h"

namespace hvl {

class LoopbackControlPlane : public ControlPlane {
 public:
  explicit LoopbackControlPlane(const CoordinatorHostOptions& options) : coordinator_host_(options) {}

  Status send(const Message& message) override { return coordinator_host_.accept(0, message, now_ns()); }
  Status pump(bool*) override {
    coordinator_host_.decide([](const Decision&) {});
    return Status();
  }
  Status next(Record* record, bool* found) override {
    *found = coordinator_host_.next(record);
    return Status();
  }
  bool has_news() override { return coordinator_host_.has_messages() || coordinator_host_.has_records(); }
  bool is_flushed() override { return true; }
  Status check_stalls() override { return Status(); }

 private:
  CoordinatorHost coordinator_host_;
};

}  // namespace hvl
