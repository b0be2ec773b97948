#include "negotiate/coordinator_seat.h"

#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace hvl {

Status CoordinatorSeat::accept(int rank, const Message& message, uint64_t sent) {
  accepted_ = true;
  return coordinator_.on_message(rank, message, sent);
}

Status CoordinatorSeat::accept(const Message& message, uint64_t came) {
  accepted_ = true;
  return coordinator_.on_message(message, came);
}

void CoordinatorSeat::decide(const std::function<void(const Decision&)>& publish) {
  if (!accepted_) return;
  accepted_ = false;
  decisions_.clear();
  coordinator_.decide(&decisions_);
  for (Decision& decision : decisions_) {
    if (is_logged(LogLevel::kTrace)) log(LogLevel::kTrace, "decided: " + decision.reason.text());
    publish(decision);
    log_.push_back(std::move(decision.record));
  }
}

bool CoordinatorSeat::next(Record* record) {
  if (log_.empty()) return false;
  *record = std::move(log_.front());
  log_.pop_front();
  return true;
}

Status CoordinatorSeat::check_stalls(StackQuestions* questions) {
  const uint64_t now = now_ns();
  const uint64_t latest = inspector_.latest_stall(now);
  if (verdict_.warning.empty()) {
    verdict_ = inspector_.inspect(coordinator_.pending(latest), now);
    if (!verdict_.warning.empty()) questions->ask(verdict_.missing, now);
  }
  if (verdict_.warning.empty() || !questions->is_over(now)) return Status();
  const std::string report = verdict_.warning + "\n" + questions->report();
  // Those that were missing may have come while they were asked.
  const bool ends = verdict_.shut_down && inspector_.is_over(coordinator_.pending(latest), now);
  verdict_ = StallVerdict();
  if (ends) return Status(HVL_JOB_BROKEN, report);
  log(LogLevel::kWarning, report);
  return Status();
}

}  // namespace hvl
