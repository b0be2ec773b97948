// The control plane of a job of one rank: the coordinator is all there is.
#pragma once

#include "control/coordinator_host.h"

namespace hvl {

class LoopbackControlPlane : public ControlPlane {
 public:
  explicit LoopbackControlPlane(const SeatOptions& options) : seat_(options) {}

  Status send(const Message& message) override { return seat_.accept(0, message, now_ns()); }
  Status pump(bool*) override {
    seat_.decide([](const Decision&) {});
    return Status();
  }
  Status next(Record* record, bool* found) override {
    *found = seat_.next(record);
    return Status();
  }
  bool has_news() override { return seat_.has_messages() || seat_.has_records(); }
  bool is_flushed() override { return true; }
  Status check_stalls() override { return Status(); }

 private:
  CoordinatorSeat seat_;
};

}  // namespace hvl
