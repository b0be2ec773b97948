// The part of the engine that decides which thread does the work.

#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cfenv>
#include <exception>
#include <utility>

#include "engine/engine.h"

namespace hvl {

namespace {

// One more thread that waits, as long as this lives.
class CountedWait {
 public:
  explicit CountedWait(std::atomic<uint32_t>* waits) : waits_(waits) { waits_->fetch_add(1); }
  ~CountedWait() { waits_->fetch_sub(1); }
  CountedWait(const CountedWait&) = delete;
  CountedWait& operator=(const CountedWait&) = delete;

 private:
  std::atomic<uint32_t>* waits_;
};

// Rounding and the treatment of denormal numbers are each thread's own, and a framework may have changed them. As long
// as this lives they are what they are on all ranks.
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

// Time-outs of microseconds are to be kept.
void prepare_engine_thread() {
  pthread_setname_np(pthread_self(), "hvl-engine");
  prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0);
}

}  // namespace

hvl_status Engine::wait(const int64_t* handles, size_t count, uint64_t deadline) {
  const CountedWait counted(&memory_->rank(options_.local_rank).waits);
  // The last one first: what was enqueued before is most often complete when it is.
  size_t left = count;
  const auto is_complete = [&] {
    while (left > 0 && handles_->poll(handles[left - 1]) != HVL_IN_PROGRESS) --left;
    return left == 0;
  };
  const auto is_over = [&] { return is_complete() || now_ns() >= deadline; };
  // What is not ours is called by one thread only: the engine's own, on which no signal handler runs.
  const bool may_work = !options_.external;
  if (!may_work) memory_->notify(options_.local_rank, kWakeNews);
  bool interrupted = false;
  while (!interrupted && !is_over()) {
    std::unique_lock<std::mutex> lock(engine_lock_, std::defer_lock);
    uint64_t spent = 0;
    // It yields: who has the engine lock may be on this processor.
    if (spin_until([&] { return is_over() || (may_work && lock.try_lock()); }, kUrgentSpin, true, &spent) ==
        Spin::kInVain) {
      // Should he who has it be about to sleep, he is to look at the queue once more.
      memory_->notify(options_.local_rank, kWakeNews);
      interrupted = handles_->wait(handles[left - 1], deadline) == HVL_IN_PROGRESS;
    } else if (lock.owns_lock()) {
      work(WaitingParty::kWaitingThread, std::cref(is_over), deadline);
      interrupted = waiter_.is_interrupted();
      give_back(std::move(lock));
    }
  }
  if (is_complete()) return HVL_OK;
  request_flush();  // he will look again
  return HVL_IN_PROGRESS;
}

void Engine::run() {
  prepare_engine_thread();
  bool ended = false;
  while (!ended) {
    uint64_t timeout = kWatchInterval;
    const uint32_t seen = doorbell().notifications(WaitingParty::kEngineThread);
    std::unique_lock<std::mutex> lock(engine_lock_, std::try_to_lock);
    if (lock.owns_lock()) {
      work(WaitingParty::kEngineThread, [] { return false; }, UINT64_MAX);
      ended = ended_;
      is_gpu_watched_ = is_gpu_busy();
      timeout = idle_timeout();
      give_back(std::move(lock));
    }
    if (ended) break;
    if (poller_ != nullptr) {
      poller_->sleep_engine_thread(timeout);
    } else {
      doorbell().sleep(WaitingParty::kEngineThread, seen, timeout);
    }
  }
}

// From here on it is the engine's thread that listens.
void Engine::give_back(std::unique_lock<std::mutex> lock) {
  const uint32_t seen = doorbell().notifications(WaitingParty::kEngineThread);
  doorbell().arm(WaitingParty::kEngineThread, listening());
  if (poller_ != nullptr) poller_->let_engine_thread_listen(true);
  const bool more = ended_ || has_work() || (is_gpu_busy() && !is_gpu_watched_);
  lock.unlock();
  // Who rang before the engine lock was free has woken the engine's thread in vain.
  if (!more && doorbell().notifications(WaitingParty::kEngineThread) == seen) return;
  if (poller_ != nullptr) {
    poller_->call_engine_thread();
  } else {
    doorbell().wake(WaitingParty::kEngineThread);
  }
}

// Returns when there is enough, and when the engine has ended; a waiting thread also when it is interrupted, and the
// engine's own when there is nothing to do for the moment.
void Engine::work(WaitingParty worker, const std::function<bool()>& enough, uint64_t deadline) noexcept {
  const DefaultArithmetic arithmetic;
  doorbell().go_off_duty();
  if (poller_ != nullptr) poller_->let_engine_thread_listen(false);
  waiter_.take_turn(worker, deadline, &enough);
  if (worker == WaitingParty::kWaitingThread) waiting_since_ = 0;  // he begins to
  Status status;
  try {
    while (status.ok() && !ended_ && !waiter_.is_interrupted() && !waiter_.has_enough()) {
      bool progressed = false;
      waiter_.set_urgent(somebody_waits());
      status = step(&progressed);
      if (progressed) waiting_since_ = 0;
      if (!status.ok() || progressed || ended_) continue;
      const auto is_to_wake = [&] { return has_work() || waiter_.has_enough(); };
      const bool found = waiter_.spin(is_to_wake);
      if (!found && worker == WaitingParty::kWaitingThread)
        waiter_.sleep_unless(listening(), is_to_wake, idle_timeout());
      request_peer_flush();
      status = watch();
      if (!found && worker == WaitingParty::kEngineThread) break;
    }
  } catch (const std::exception& error) {
    status = Status(HVL_JOB_BROKEN,
                    std::string("the engine of ") + waiter_.describe(options_.local_rank) + " failed: " + error.what());
  }
  if (status.ok()) return;
  hear_why(&status);
  memory_->break_job(status.message());  // unless it is broken already
  control_->tell_broken(memory_->broken_text());
  end(Status(HVL_JOB_BROKEN, memory_->broken_text()));
}

}  // namespace hvl
