#include "engine/peer_watch.h"

#include <algorithm>

#include "observe/stack_dump.h"
#include "sync/waiter.h"

namespace hvl {

namespace {

constexpr uint64_t kStallCheckInterval = 250 * kMillisecond;

}  // namespace

Status PeerWatch::check() {
  if (context_.memory->is_broken()) return Status(HVL_JOB_BROKEN, context_.memory->broken_text());
  context_.waiter.check_peers();
  Status status = gpu_.check();
  if (!status.ok() || negotiator_.leaving_since() != 0) return status;
  status = context_.messenger.check();
  if (!status.ok()) return status;
  const uint64_t now = now_ns();
  const uint64_t stop_announced_at = negotiator_.stop_announced_at();
  if (stop_announced_at != 0 && now - stop_announced_at > context_.options.leave_timeout) {
    return Status(HVL_JOB_BROKEN, context_.describe_self() + " has shut down, and the coordinator, " +
                                      describe_coordinator() + ", did not answer");
  }
  if (now - last_check_ < kStallCheckInterval) return Status();
  last_check_ = now;
  status = check_messages(now);
  if (!status.ok()) return status;
  status = context_.control->check_stalls();
  return status.ok() ? check_coordinator(now) : status;
}

// Only if a thread waits and no collective is in flight: a receive may be posted long before its message is needed.
Status PeerWatch::check_messages(uint64_t now) {
  const MessageRequest* oldest = context_.messenger.oldest_receive();
  if (oldest == nullptr || context_.own_block().waits.load() == 0 || requests_.num_in_flight() > 0) {
    idle_at_ = now;
    return Status();
  }
  bool warned = stalled_ == oldest->handle;
  const auto describe = [&] {
    const std::string who = oldest->peer == kAnySource ? "Another rank" : context_.describe(oldest->peer);
    const std::string what = "a message to rank " + std::to_string(context_.options.rank) + " with the tag " +
                             std::to_string(oldest->header.tag) + " of process set " +
                             std::to_string(oldest->process_set);
    return Stall{who, what, "it has not sent it, or is stopped"};
  };
  const uint64_t since = std::max({idle_at_, oldest->posted_at, context_.memory->moved_at()});
  const Status status = context_.waiter.report_stall(now - std::min(now, since), &warned, describe);
  if (warned) stalled_ = oldest->handle;
  return status;
}

// The coordinator itself ends a stalled job. If it is silent for much longer, it is stuck, unless HostHeader::inquiries
// shows that it is collecting the stacks of other ranks for its report.
Status PeerWatch::check_coordinator(uint64_t now) {
  const EngineOptions& options = context_.options;
  const uint32_t inquiries = context_.memory->header().inquiries.load(std::memory_order_relaxed);
  if (inquiries != inquiries_) last_inquiry_ = now;
  inquiries_ = inquiries;
  if (requests_.num_in_flight() == 0 || options.stall_shutdown <= 0 || options.rank == 0) return Status();
  const uint64_t patience = to_ns(options.stall_shutdown) + kAnswerTime + 2 * kStallCheckInterval;
  const uint64_t silence = now - std::min(now, std::max(negotiator_.last_record(), context_.memory->moved_at()));
  if (silence < patience || now - last_inquiry_ < kAnswerTime) return Status();
  const auto may_wait = [&](const PendingRequest& request, bool is_in_full) {
    const bool joins = is_in_full && request.signature().kind == HVL_JOIN;  // a join may take long
    return joins || now - request.enqueued_at < patience;
  };
  if (requests_.has(may_wait)) return Status();
  return Status(HVL_JOB_BROKEN, describe_silence(silence / kSecond));
}

// Describes the silent coordinator and the likely reason. Only a process of this rank's own host is seen to be stopped.
std::string PeerWatch::describe_silence(uint64_t seconds) const {
  const EngineOptions& options = context_.options;
  const std::string silence = ", has said nothing for " + std::to_string(seconds) + " s: ";
  const std::string coordinator = "stalled: the coordinator, " + describe_coordinator();
  if (!options.local_pids.empty() && is_stopped(options.local_pids[0])) {
    const std::string who = is_on_coordinators_host() ? coordinator
                                                      : "stalled: " + context_.waiter.describe(0) +
                                                            ", through which this host hears of the coordinator";
    return who + silence + "its process is stopped, by a signal or a debugger";
  }
  std::string relays;
  for (int rank : options.relays_of(options.rank)) {
    relays += (relays.empty() ? "" : ", ") + options.describe_remote(rank);
  }
  if (!relays.empty()) relays = ", or so is the rank that relays its messages: " + relays;
  return coordinator + silence + "it is stopped or stuck" + relays;
}

std::string PeerWatch::describe_coordinator() const {
  return is_on_coordinators_host() ? context_.waiter.describe(0) : context_.options.describe_remote(0);
}

}  // namespace hvl
