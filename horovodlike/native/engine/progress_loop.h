// The loop that does all of the engine's work, for one thread at a time: the holder of the engine lock. A thread that
// waits for a result takes the lock if it is free, so that no thread has to wake another one and be woken by it.
// Otherwise the engine's own thread does the work, and continues what a thread leaves undone that is interrupted by a
// signal or has no time left.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "engine/peer_watch.h"
#include "engine/shutdown.h"

namespace hvl {

class ProgressLoop {
 public:
  // Starts the engine's own thread, which ends when the job does.
  ProgressLoop(EngineContext* context, const RequestTable* requests, Executor* executor, Negotiator* negotiator,
               const TuningObserver* tuner, PeerWatch* watch, Shutdown* shutdown);
  ProgressLoop(const ProgressLoop&) = delete;
  ProgressLoop& operator=(const ProgressLoop&) = delete;

  // Any thread: see Engine.
  void notify();
  hvl_status wait(const int64_t* handles, size_t count, uint64_t deadline);
  void request_flush();
  // Any thread, before notify(): the requests that it tells of are not deferred.
  void flush_next() { flush_requested_.store(true); }
  // Any thread: a message has been posted. Begins it at once, unless another thread runs the engine and will.
  void progress_messages();
  // Any thread: returns when the engine's thread has ended, for which the context's stop_requested is set.
  void join();

 private:
  // Requests that are deferred to make larger batches.
  struct Hold {
    uint64_t since = 0;  // 0: none are
    uint64_t limit = 0;  // for how long they were to be
  };
  // A thread waits while nothing happens.
  struct IdleWait {
    uint64_t since = 0;  // when it was first seen; 0: no thread does
    uint64_t next_request = 0;
  };

  // Any thread.
  Doorbell& doorbell() const { return context_.own_block().doorbell; }
  bool is_waited_for() const { return context_.own_block().waits.load() > 0; }
  bool is_wanted() const;
  // The engine's own thread.
  void run();
  // The rest is for the holder of the engine lock.
  void work(WaitingParty worker, const std::function<bool()>& enough, uint64_t deadline) noexcept;
  void give_back(std::unique_lock<std::mutex> lock);
  Status step(bool* progressed);
  Status send(bool* progressed);
  bool has_work();
  uint32_t listening() const;  // to which reasons
  uint64_t idle_timeout() const;
  void request_peer_flush();
  uint64_t hold_limit() const;
  bool defers();

  EngineContext& context_;
  const RequestTable& requests_;
  Executor& executor_;
  Negotiator& negotiator_;
  const TuningObserver& tuner_;
  PeerWatch& watch_;
  Shutdown& shutdown_;
  std::atomic<bool> flush_requested_{false};
  std::mutex engine_lock_;  // no lock is held when it is taken
  // For the holder of the engine lock.
  bool is_gpu_watched_ = false;  // the engine's thread wakes up to watch it
  Hold hold_;
  IdleWait idle_wait_;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace hvl
