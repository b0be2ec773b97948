#include "control/coordinator_host.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace hvl {

Status CoordinatorHost::accept(int rank, const Message& message, uint64_t sent) {
  accepted_ = true;
  return coordinator_.on_message(rank, message, sent);
}

Status CoordinatorHost::accept(const Message& message, uint64_t came) {
  accepted_ = true;
  return coordinator_.on_message(message, came);
}

void CoordinatorHost::decide(const std::function<void(Decision&&)>& publish) {
  if (!accepted_) return;
  accepted_ = false;
  decisions_.clear();
  coordinator_.decide(&decisions_);
  for (Decision& decision : decisions_) {
    if (is_logged(LogLevel::kTrace)) log(LogLevel::kTrace, "decided: " + decision.reason.text());
    publish(std::move(decision));
  }
}

Status CoordinatorHost::check_stalls(StackDumpRequests* questions, uint64_t moved_at,
                                     const std::function<void()>& show_inquiry) {
  const uint64_t now = std::max(now_ns(), moved_at);
  std::vector<Pending> pending = coordinator_.pending(inspector_.latest_stall(now));
  for (Pending& each : pending) each.since = std::max(each.since, moved_at);
  const bool is_over = inspector_.is_over(pending, now);
  if (is_over) show_inquiry();
  if (verdict_.warning.empty()) {
    verdict_ = inspector_.inspect(pending, now);
    if (!verdict_.missing.empty()) {
      questions->ask(verdict_.missing, now);
      show_inquiry();
    }
  }
  if (verdict_.warning.empty() || !questions->is_over(now)) return Status();
  // Since the stack-dump request, missing ranks may have become ready, and a tensor may have exceeded its time limit.
  const StallVerdict asked = std::exchange(verdict_, StallVerdict());
  const StallVerdict last = is_over ? inspector_.inspect(pending, now) : StallVerdict();
  const bool has_asked_all =
      std::includes(asked.missing.begin(), asked.missing.end(), last.missing.begin(), last.missing.end());
  if (is_over && (has_asked_all || asked.shut_down)) {
    return Status(HVL_JOB_BROKEN, last.warning + "\n" + questions->report());
  }
  log(LogLevel::kWarning, asked.missing.empty() ? asked.warning : asked.warning + "\n" + questions->report());
  return Status();  // if the time is over, the next call asks the other missing ranks
}

Status LoopbackControlPlane::next(Record* record, bool* found) {
  *found = !log_.empty();
  if (!*found) return Status();
  *record = std::move(log_.front());
  log_.pop_front();
  return Status();
}

}  // namespace hvl
