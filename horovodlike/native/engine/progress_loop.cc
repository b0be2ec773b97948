#include "engine/progress_loop.h"

#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cfenv>
#include <exception>
#include <utility>

namespace hvl {

namespace {

constexpr uint64_t kIdleInterval = 500 * kMillisecond;
constexpr int64_t kWorthSending = 1 << 20;  // bytes
constexpr uint64_t kMaxHold = 50 * kMillisecond;
constexpr uint64_t kFirstRequest = kMillisecond;

// Counts one more waiting thread while this object lives.
class CountedWait {
 public:
  explicit CountedWait(std::atomic<uint32_t>* waits) : waits_(waits) { waits_->fetch_add(1); }
  ~CountedWait() { waits_->fetch_sub(1); }
  CountedWait(const CountedWait&) = delete;
  CountedWait& operator=(const CountedWait&) = delete;

 private:
  std::atomic<uint32_t>* waits_;
};

// Adds the time since the first now() to a sum, at its end. Costs nothing if there is no wait.
class BlockedTime {
 public:
  explicit BlockedTime(std::atomic<int64_t>* sum) : sum_(sum) {}
  ~BlockedTime() {
    if (begin_ != 0) sum_->fetch_add(static_cast<int64_t>(now_ns() - begin_), std::memory_order_relaxed);
  }
  BlockedTime(const BlockedTime&) = delete;
  BlockedTime& operator=(const BlockedTime&) = delete;

  uint64_t now() {
    const uint64_t now = now_ns();
    if (begin_ == 0) begin_ = now;
    return now;
  }

 private:
  std::atomic<int64_t>* sum_;
  uint64_t begin_ = 0;
};

// Sets the default rounding and treatment of denormal numbers while it lives, so that all ranks compute alike. These
// modes belong to a thread, and a framework may have changed them.
class DefaultArithmetic {
 public:
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

#if defined(__x86_64__)  // fegetenv() would also save the state of the x87 unit, which takes long and is not used
  DefaultArithmetic() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(kDefaultControl); }
  ~DefaultArithmetic() { __builtin_ia32_ldmxcsr(before_); }

 private:
  static constexpr unsigned kDefaultControl = 0x1f80;  // round to nearest, keep denormals, mask all exceptions
  unsigned before_;
#else
  DefaultArithmetic() {
    fegetenv(&before_);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { fesetenv(&before_); }

 private:
  fenv_t before_;
#endif
};

// Names the thread, and has the kernel keep its timeouts to a microsecond.
void prepare_engine_thread() {
  pthread_setname_np(pthread_self(), "hvl-engine");
  prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
}

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

ProgressLoop::ProgressLoop(EngineContext* context, const RequestTable* requests, Executor* executor,
                           Negotiator* negotiator, const TuningObserver* tuner, PeerWatch* watch, Shutdown* shutdown)
    : context_(*context),
      requests_(*requests),
      executor_(*executor),
      negotiator_(*negotiator),
      tuner_(*tuner),
      watch_(*watch),
      shutdown_(*shutdown) {
  const SignalsBlocked while_the_thread_is_made;  // it inherits the mask: signals are for the framework's threads
  thread_ = std::thread([this] { run(); });
}

void ProgressLoop::join() {
  if (!thread_.joinable()) return;
  thread_.join();
  if (context_.poller == nullptr || !context_.memory->is_broken()) return;
  // The other hosts must be told that the job is broken.
  const std::lock_guard<std::mutex> lock(engine_lock_);
  const std::function<bool()> never = [] { return false; };
  context_.waiter.take_turn(WaitingParty::kEngineThread, UINT64_MAX, &never);
  shutdown_.flush_before_leaving();
}

void ProgressLoop::notify() {
  // Requests that are deferred are sent when this rank waits, when another rank that waits asks for them, or after
  // kMaxHold at the latest.
  if (context_.options.overlap || is_wanted()) context_.notify_news();
}

void ProgressLoop::request_flush() {
  if (!flush_requested_.exchange(true)) context_.notify_news();
}

hvl_status ProgressLoop::wait(const int64_t* handles, size_t count, uint64_t deadline) {
  const CountedWait counted(&context_.own_block().waits);
  BlockedTime blocked(&context_.counters.blocked_time);
  // Polls the last handle first: when it is complete, those enqueued before it most often are, too.
  size_t left = count;
  const auto is_complete = [&] {
    while (left > 0 && context_.handles->poll(handles[left - 1]) != HVL_IN_PROGRESS) --left;
    return left == 0;
  };
  const auto is_over = [&] { return is_complete() || blocked.now() >= deadline; };
  // An external data plane is called by the engine's own thread only, on which no signal handler runs.
  const bool may_work = !context_.options.external || context_.external_plane != nullptr;
  if (!may_work) context_.notify_news();
  bool interrupted = false;
  while (!interrupted && !is_over()) {
    std::unique_lock<std::mutex> lock(engine_lock_, std::defer_lock);
    uint64_t spent = 0;
    // Spin with sched_yield(): the thread that holds the engine lock may be scheduled on this processor.
    if (spin_until(
            [&] {
              return is_over() || (may_work && !is_handed_over_.load(std::memory_order_relaxed) && lock.try_lock());
            },
            kUrgentSpin, true, &spent) == Spin::kInVain) {
      // The holder of the engine lock may be about to sleep: it must look at the queue once more.
      context_.notify_news();
      interrupted = context_.handles->wait(handles[left - 1], deadline) == HVL_IN_PROGRESS;
    } else if (lock.owns_lock()) {
      work(WaitingParty::kWaitingThread, std::cref(is_over), deadline);
      interrupted = context_.waiter.is_interrupted();
      release(std::move(lock));
    }
  }
  if (is_complete()) return HVL_OK;
  request_flush();  // the caller will ask again
  return HVL_IN_PROGRESS;
}

void ProgressLoop::progress_messages() {
  std::unique_lock<std::mutex> lock(engine_lock_, std::try_to_lock);
  if (!lock.owns_lock() && context_.messenger.has_ended()) lock.lock();  // no other thread moves messages any more
  if (!lock.owns_lock()) return context_.notify_news();                  // the lock's holder may be about to sleep
  doorbell().disarm();
  move_messages();
  release(std::move(lock));
}

void ProgressLoop::move_messages() {
  bool progressed = false;
  const Status status = context_.messenger.progress(&progressed);
  context_.handles->wake_waiters();
  if (!status.ok()) context_.memory->break_job(status.message());  // the engine's thread then ends the job
}

void ProgressLoop::run() {
  prepare_engine_thread();
  bool ended = false;
  while (!ended) {
    uint64_t timeout = kWatchInterval;
    const uint32_t seen = doorbell().notifications(WaitingParty::kEngineThread);
    std::unique_lock<std::mutex> lock(engine_lock_, std::try_to_lock);
    if (lock.owns_lock()) {
      work(WaitingParty::kEngineThread, [] { return false; }, UINT64_MAX);
      ended = shutdown_.has_ended();
      is_gpu_watched_ = watch_.watches_gpu();
      timeout = idle_timeout();
      release(std::move(lock));
    }
    if (ended) break;
    if (context_.poller != nullptr) {
      context_.poller->sleep_engine_thread(timeout);
    } else {
      doorbell().sleep(WaitingParty::kEngineThread, seen, timeout);
    }
  }
}

// Releases the engine lock. From here on notifications wake the engine's own thread.
void ProgressLoop::release(std::unique_lock<std::mutex> lock) {
  // This thread reads messages that have come: the engine's thread does not need to wake for them.
  if (!shutdown_.has_ended() && context_.messenger.has_news()) move_messages();
  is_handed_over_.store(executor_.needs_engine_thread(), std::memory_order_relaxed);
  const uint32_t seen = doorbell().notifications(WaitingParty::kEngineThread);
  doorbell().arm(WaitingParty::kEngineThread, listening());
  if (context_.poller != nullptr) context_.poller->let_engine_thread_listen(true);
  const bool more = shutdown_.has_ended() || has_work() || (watch_.watches_gpu() && !is_gpu_watched_);
  lock.unlock();
  // A notification before the engine lock was free has woken the engine's thread in vain.
  if (!more && doorbell().notifications(WaitingParty::kEngineThread) == seen) return;
  if (context_.poller != nullptr) {
    context_.poller->call_engine_thread();
  } else {
    doorbell().wake(WaitingParty::kEngineThread);
  }
}

// Runs the engine until enough() is true, the engine has ended, or the waiting thread is interrupted. The engine's own
// thread also returns when there is nothing to do for the moment.
void ProgressLoop::work(WaitingParty worker, const std::function<bool()>& enough, uint64_t deadline) noexcept {
  const DefaultArithmetic arithmetic;
  doorbell().disarm();
  if (context_.poller != nullptr) context_.poller->let_engine_thread_listen(false);
  context_.waiter.take_turn(worker, deadline, &enough);
  if (worker == WaitingParty::kWaitingThread) idle_wait_.since = 0;  // it begins to wait
  Status status;
  try {
    while (status.ok() && !shutdown_.has_ended() && !context_.waiter.is_interrupted() &&
           !context_.waiter.has_enough() &&
           !(worker == WaitingParty::kWaitingThread && executor_.needs_engine_thread())) {
      bool progressed = false;
      context_.waiter.set_urgent(is_waited_for());
      status = step(&progressed);
      if (progressed) idle_wait_.since = 0;
      if (!status.ok() || progressed || shutdown_.has_ended()) continue;
      const auto is_to_wake = [&] { return has_work() || context_.waiter.has_enough(); };
      const bool found = context_.waiter.spin(is_to_wake);
      if (!found && worker == WaitingParty::kWaitingThread)
        context_.waiter.sleep_unless(listening(), is_to_wake, idle_timeout());
      request_peer_flush();
      status = watch_.check();
      if (!found && worker == WaitingParty::kEngineThread) break;
    }
  } catch (const std::exception& error) {
    status = Status(HVL_JOB_BROKEN, "the engine of " + context_.describe_self() + " failed: " + error.what());
  }
  if (!status.ok()) shutdown_.break_job(std::move(status));
}

// Continues an interrupted collective, then runs the log. With overlap it stops as soon as has_enough() is true: the
// engine's own thread does the rest. Without overlap that thread would only take the same processor.
Status ProgressLoop::step(bool* progressed) {
  if (negotiator_.leaving_since() != 0) return shutdown_.leave();
  const size_t num_in_flight = requests_.num_in_flight();
  Status status = send(progressed);
  if (status.ok()) status = context_.messenger.progress(progressed);
  if (status.ok()) status = context_.control->pump(progressed);
  if (*progressed) context_.handles->wake_waiters();
  if (requests_.num_in_flight() > num_in_flight && negotiator_.fault().is_armed()) negotiator_.fault().trigger();
  while (status.ok() && !shutdown_.has_ended() && !context_.waiter.is_interrupted() &&
         !(context_.options.overlap && context_.waiter.has_enough())) {
    if (executor_.is_running()) {
      status = executor_.resume();
    } else {
      bool found = true;
      status = negotiator_.run_next(&found);
      if (!found) break;
      if (status.ok() && negotiator_.leaving_since() != 0) status = shutdown_.leave();
    }
    *progressed = true;
    context_.handles->wake_waiters();
    if (executor_.is_running()) break;  // it was interrupted
  }
  return status;
}

Status ProgressLoop::send(bool* progressed) {
  if (context_.stop_requested.load() && negotiator_.stop_announced_at() == 0) {
    *progressed = true;
    Status status = negotiator_.announce_stop();
    if (!status.ok()) return status;
  }
  if (context_.queue.empty() || defers()) return Status();
  flush_requested_.store(false);
  *progressed = true;
  return negotiator_.submit();
}

bool ProgressLoop::has_work() {
  if (context_.messenger.has_news()) return true;
  if (negotiator_.leaving_since() != 0) return context_.memory->is_broken();
  const bool queue_has_work = hold_.since != 0 ? is_wanted() || hold_limit() < hold_.limit : !context_.queue.empty();
  return queue_has_work || executor_.is_running() || context_.control->has_news() || context_.memory->is_broken() ||
         (context_.stop_requested.load() && negotiator_.stop_announced_at() == 0);
}

uint32_t ProgressLoop::listening() const {
  // With nothing in flight here, not even a join, requests of other ranks can run only on sets without this rank.
  const bool may_run = requests_.num_in_flight() > 0 || negotiator_.has_process_sets();
  return kWakeNews | (may_run ? kWakeReady : 0u) | (context_.messenger.awaits_peers() ? kWakeMessage : 0u) |
         (context_.control->is_flushed() && !context_.messenger.awaits_room() ? 0u : kWakeRoom);
}

uint64_t ProgressLoop::idle_timeout() const {
  if (negotiator_.leaving_since() != 0) return kWatchInterval;
  const bool is_idle = requests_.num_in_flight() == 0 && !context_.messenger.awaits_peers() && !watch_.watches_gpu();
  uint64_t timeout = is_idle ? kIdleInterval : kWatchInterval;
  if (!context_.options.overlap) timeout = std::min(timeout, kMaxHold);  // no notification comes for deferred requests
  const uint64_t now = now_ns();
  auto be_there_at = [&](uint64_t time) { timeout = std::min(timeout, time - std::min(now, time)); };
  if (hold_.since != 0) be_there_at(hold_.since + hold_.limit);
  if (idle_wait_.since != 0) be_there_at(idle_wait_.next_request);
  be_there_at(context_.control->next_deadline());
  if (context_.poller != nullptr && !context_.control->is_flushed()) timeout = std::min(timeout, kMillisecond);
  return timeout;
}

// While a thread waits here without progress, asks the ranks that defer requests to send them, as the result may depend
// on them. Not at once: most often a thread of these ranks soon waits, too, which ends the deferral.
void ProgressLoop::request_peer_flush() {
  const uint64_t now = now_ns();
  if (!is_waited_for()) {
    idle_wait_.since = 0;
  } else if (idle_wait_.since == 0) {
    idle_wait_.since = now;
    idle_wait_.next_request = now + kFirstRequest;
  } else if (now >= idle_wait_.next_request) {
    idle_wait_.next_request = now + std::min(now - idle_wait_.since, kMaxHold);
    context_.memory->notify_deferring_ranks(context_.options.local_rank);
  }
}

// True if requests must not be deferred: a thread here asks for results, the engine stops, requests have
// waited for their names, or enough bytes are queued.
bool ProgressLoop::is_wanted() const {
  return is_waited_for() || flush_requested_.load() || context_.stop_requested.load() || context_.queue.has_waited() ||
         (context_.options.overlap && context_.queue.queued_bytes() >= kWorthSending);
}

// The longest time to defer requests while is_wanted() is false. Each start costs the computing threads context
// switches and cached data, and more requests will follow soon. Without overlap there is no processor to spare: it is
// best to start when the threads have nothing left to compute, which shows when a thread of another rank waits.
uint64_t ProgressLoop::hold_limit() const {
  if (context_.options.overlap) return tuner_.cycle_time();
  return context_.memory->another_waits(context_.options.local_rank) ? 0 : kMaxHold;
}

bool ProgressLoop::defers() {
  hold_.limit = hold_limit();
  bool hold = hold_.limit > 0 && !is_wanted();
  if (hold && hold_.since == 0) hold_.since = now_ns();
  hold = hold && now_ns() - hold_.since < hold_.limit;
  if (!hold) hold_.since = 0;
  return hold;
}

}  // namespace hvl
