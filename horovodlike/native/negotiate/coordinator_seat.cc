#include "negotiate/coordinator_seat.h"

#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace hvl {

Status CoordinatorSeat::accept(int rank, const Message& message) {
  accepted_ = true;
  return coordinator_.on_message(rank, message, now_ns());
}

void CoordinatorSeat::decide(const std::function<void(const Record&)>& publish) {
  if (!accepted_) return;
  accepted_ = false;
  decisions_.clear();
  coordinator_.decide(&decisions_);
  for (Decision& decision : decisions_) {
    if (is_logged(LogLevel::kTrace)) log(LogLevel::kTrace, "decided: " + decision.reason.text());
    publish(decision.record);
    log_.push_back(std::move(decision.record));
  }
}

bool CoordinatorSeat::next(Record* record) {
  if (log_.empty()) return false;
  *record = std::move(log_.front());
  log_.pop_front();
  return true;
}

Status CoordinatorSeat::check_stalls() {
  StallVerdict verdict = inspector_.inspect(coordinator_.pending(), now_ns());
  if (verdict.shut_down) return Status(HVL_JOB_BROKEN, verdict.warning);
  if (!verdict.warning.empty()) log(LogLevel::kWarning, verdict.warning);
  return Status();
}

}  // namespace hvl
