#include "engine/shutdown.h"

#include <utility>

namespace hvl {

// First waits, without a limit, for the work of the GPU: streams wait for it, and no error can be reported to them.
// Until then this rank and the others still watch each other.
Status Shutdown::leave() {
  const Status status = gpu_.check();
  if (!status.ok()) return status;
  if (gpu_.is_working()) {
    gpu_.warn_if_busy(negotiator_.leaving_since());
    return Status();
  }
  const Status received = receive_last_messages();
  if (!received.ok()) return received;
  const bool may_wait = now_ns() - negotiator_.leaving_since() < context_.options.leave_timeout;
  if (may_wait && !context_.messenger.is_finished()) return Status();
  flush_before_leaving();
  end(Status(HVL_SHUT_DOWN, negotiator_.why_it_ended()));
  return Status();
}

// Receives the messages that other ranks sent before they shut down. Those in shared memory have all arrived by now.
Status Shutdown::receive_last_messages() {
  context_.messenger.finish();
  Status status;
  for (bool progressed = true; status.ok() && progressed;) {
    progressed = false;
    status = context_.messenger.progress(&progressed);
  }
  return status;
}

void Shutdown::break_job(Status status) {
  hear_why(&status);
  context_.memory->break_job(status.message());  // unless it is broken already
  const std::string why = context_.memory->broken_text();
  context_.control->tell_broken(why);
  // Directly, too: the way between hosts in the tree may lead through the lost host.
  if (context_.options.local_rank == 0) context_.messenger.tell_broken(why);
  end(Status(HVL_JOB_BROKEN, why));
}

// If a collective has failed because a connection was lost, waits for a report of the cause: most often the rank at the
// other end of the connection has itself lost a third rank before, and reports which one. The report comes through the
// leader of this host, or as a message. If the leader is the rank that is lost, the end of its process shows that.
void Shutdown::hear_why(Status* status) {
  if (!executor_.has_failed() || context_.poller == nullptr) return;
  HostMemory& memory = *context_.memory;
  const uint64_t deadline = now_ns() + kTimeToSayWhy;
  while (!memory.is_broken() && now_ns() < deadline) {
    context_.check_other_hosts();
    context_.waiter.check_peers();
    bool progressed = false;
    const Status heard = context_.messenger.progress(&progressed);
    if (!heard.ok()) memory.break_job(heard.message());
    context_.waiter.sleep_unless(kWakeAlways, [&] { return memory.is_broken(); }, kMillisecond);
  }
  if (memory.is_broken()) *status = Status(HVL_JOB_BROKEN, memory.broken_text());
}

void Shutdown::flush_before_leaving() {
  ControlPlane& control = *context_.control;
  HostMemory& memory = *context_.memory;
  control.finish();
  bool progressed = false;
  const bool was_broken = memory.is_broken();
  const uint64_t deadline = now_ns() + (was_broken ? kTimeToSayWhy : context_.options.leave_timeout);
  const auto is_broken_now = [&] { return !was_broken && memory.is_broken(); };
  while (!control.is_flushed() && !is_broken_now() && now_ns() < deadline) {
    if (!control.pump(&progressed).ok()) break;
    context_.waiter.sleep_unless(kWakeAlways, [&] { return control.has_news() || is_broken_now(); }, kWatchInterval);
    context_.waiter.check_peers();
  }
  if (control.is_flushed()) context_.own_block().left.store(1);
}

void Shutdown::end(const Status& reason) {
  has_ended_ = true;
  negotiator_.gather_queued();
  const std::vector<const PendingRequest*> in_flight = requests_.in_flight();
  const Status status = reporter_.explain(reason, in_flight);
  if (status.code() == HVL_JOB_BROKEN) {
    reporter_.write_records(reason, in_flight);
    if (context_.options.external) {
      const hvl_external& external = context_.options.external->functions;
      external.broken(external.context, reason.message().c_str());
    }
  }
  tuner_.stop();
  context_.queue.close(status);
  gpu_.end(status);
  do {  // requests queued before the queue was closed, then those that waited for their names
    negotiator_.gather_queued();
    requests_.fail_all(status);
  } while (!context_.queue.empty());
  executor_.end();
  context_.own_block().ended.store(1);
  context_.messenger.end(status);
  context_.handles->wake_waiters();
}

}  // namespace hvl
