// The part of the engine that sees to it that the others live and get on, and that they hear how the job ends.

#include "engine/engine.h"
#include "observe/stack_dump.h"

namespace hvl {

namespace {

constexpr uint64_t kStallCheckInterval = 250 * kMillisecond;
constexpr uint64_t kTimeToSayWhy = 300 * kMillisecond;

}  // namespace

Status Engine::watch() {
  if (memory_->is_broken()) return Status(HVL_JOB_BROKEN, memory_->broken_text());
  waiter_.check_peers();
  Status status = watch_gpu();
  if (!status.ok() || leaving_since_ != 0) return status;
  uint64_t now = now_ns();
  if (stop_announced_ && now - stop_announced_at_ > options_.leave_timeout) {
    return Status(HVL_JOB_BROKEN, waiter_.describe(options_.local_rank) + " has shut down, and the coordinator, " +
                                      describe_coordinator() + ", did not answer");
  }
  if (now - last_watch_ < kStallCheckInterval) return Status();
  last_watch_ = now;
  status = control_->check_stalls();
  return status.ok() ? check_coordinator(now) : status;
}

// The coordinator ends a stalled job. If it says nothing for much longer, it is itself what is stuck; but while it asks
// for the report on others where they are, it says that.
Status Engine::check_coordinator(uint64_t now) {
  const uint32_t inquiries = memory_->header().inquiries.load(std::memory_order_relaxed);
  if (inquiries != inquiries_) last_inquiry_ = now;
  inquiries_ = inquiries;
  if (num_in_flight_ == 0 || options_.stall_shutdown <= 0 || options_.rank == 0) return Status();
  const uint64_t patience = to_ns(options_.stall_shutdown) + kAnswerTime + 2 * kStallCheckInterval;
  if (now - last_record_ < patience || now - last_inquiry_ < kAnswerTime) return Status();
  const auto is_recent = [&](const NamedTensor* tensor) {
    return tensor != nullptr && tensor->entry != nullptr && now - tensor->entry->enqueued_at < patience;
  };
  for (const auto& [id, known] : known_) {
    if (is_recent(known.tensor.get())) return Status();
  }
  for (const auto& [key, tensor] : in_full_) {
    // Who joins may wait for long.
    const bool joins = tensor->entry != nullptr && tensor->entry->signature().kind == HVL_JOIN;
    if (joins || is_recent(tensor.get())) return Status();
  }
  return Status(HVL_JOB_BROKEN, describe_silence((now - last_record_) / kSecond));
}

// That this rank has not heard of the coordinator. Of processes on its own host it can see whether they are stopped.
std::string Engine::describe_silence(uint64_t seconds) const {
  const std::string silence = ", has said nothing for " + std::to_string(seconds) + " s: ";
  const std::string coordinator = "stalled: the coordinator, " + describe_coordinator();
  if (!options_.local_pids.empty() && is_stopped(options_.local_pids[0])) {
    const std::string who = is_on_coordinators_host() ? coordinator
                                                      : "stalled: " + waiter_.describe(0) +
                                                            ", through which this host hears of the coordinator";
    return who + silence + "its process is stopped, by a signal or a debugger";
  }
  std::string relays;
  for (int rank : options_.relays_of(options_.rank)) {
    relays += (relays.empty() ? "" : ", ") + options_.describe_remote(rank);
  }
  if (!relays.empty()) relays = ", or so is the rank that relays its messages: " + relays;
  return coordinator + silence + "it is stopped or stuck" + relays;
}

std::string Engine::describe_coordinator() const {
  return is_on_coordinators_host() ? waiter_.describe(0) : options_.describe_remote(0);
}

void Engine::check_other_hosts() {
  const Status status = control_->check_other_hosts();
  if (!status.ok()) memory_->break_job(status.message());
}

// A collective has failed since a connection was lost. Most often not he is to blame who was at its other end, but
// somebody whom he was the first to miss: he says whom. If that is the leader of this host, through whom it would be
// heard, his own process tells.
void Engine::hear_why(Status* status) {
  if (!has_failed_ || poller_ == nullptr) return;
  const uint64_t deadline = now_ns() + kTimeToSayWhy;
  while (!memory_->is_broken() && now_ns() < deadline) {
    check_other_hosts();
    waiter_.check_peers();
    waiter_.sleep_unless(kWakeAlways, [this] { return memory_->is_broken(); }, kMillisecond);
  }
  if (memory_->is_broken()) *status = Status(HVL_JOB_BROKEN, memory_->broken_text());
}

// The log has ended. What a GPU was given before is done first, however long that takes: streams wait for it, and
// nobody can tell them that it failed. Until then this rank looks after the others, and they after it.
Status Engine::leave() {
  const Status status = watch_gpu();
  if (!status.ok()) return status;
  if (is_gpu_working()) {
    warn_of_busy_gpu();
    return Status();
  }
  flush_before_leaving();
  end(Status(HVL_SHUT_DOWN, why_it_ended_));
  return Status();
}

void Engine::flush_before_leaving() {
  control_->finish();
  bool progressed = false;
  const bool was_broken = memory_->is_broken();
  const uint64_t deadline = now_ns() + (was_broken ? kTimeToSayWhy : options_.leave_timeout);
  const auto is_broken_now = [&] { return !was_broken && memory_->is_broken(); };
  while (!control_->is_flushed() && !is_broken_now() && now_ns() < deadline) {
    if (!control_->pump(&progressed).ok()) break;
    waiter_.sleep_unless(kWakeAlways, [&] { return control_->has_news() || is_broken_now(); }, kWatchInterval);
    waiter_.check_peers();
  }
  if (control_->is_flushed()) memory_->rank(options_.local_rank).left.store(1);
}

}  // namespace hvl
