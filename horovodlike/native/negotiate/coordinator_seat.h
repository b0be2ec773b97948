// What surrounds the coordinator on the rank that holds it, whatever way its messages come and its log goes.
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "negotiate/control_plane.h"
#include "negotiate/coordinator.h"
#include "watch/stall_inspector.h"

namespace hvl {

struct SeatOptions {
  CoordinatorOptions coordinator;
  double stall_warning = 60;
  double stall_shutdown = 0;
};

class CoordinatorSeat {
 public:
  explicit CoordinatorSeat(const SeatOptions& options)
      : coordinator_(options.coordinator), inspector_(options.stall_warning, options.stall_shutdown) {}

  Status accept(int rank, const Message& message);
  // Decides; passes every new record to `publish`, then keeps it for this rank itself.
  void decide(const std::function<void(const Record&)>& publish);
  bool next(Record* record);
  bool has_messages() const { return accepted_; }
  bool has_records() const { return !log_.empty(); }
  Status check_stalls();

 private:
  Coordinator coordinator_;
  StallInspector inspector_;
  std::vector<Decision> decisions_;
  std::deque<Record> log_;  // what this rank itself has still to run
  bool accepted_ = false;   // messages came since the last decision
};

}  // namespace hvl
