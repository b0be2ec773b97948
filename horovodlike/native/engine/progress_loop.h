// The loop that does all of the engine's work, on one thread at a time: the holder of the engine lock. A thread that
// waits for a result takes the lock if it is free and does the work itself: that saves waking the engine's own thread
// and being woken by it. Otherwise the engine's own thread does the work. It also resumes a collective that a waiting
// thread has left unfinished because of a signal or its deadline.
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
  // Any thread, before notify(): the requests in the queue are not deferred.
  void flush_next() { flush_requested_.store(true); }
  // Any thread: begins a posted send or receive at once, or leaves that to the thread that holds the engine lock.
  void progress_messages();
  // Any thread: waits until the engine's own thread has ended. The caller has set the context's stop_requested.
  void join();

 private:
  // The deferral of requests to make larger batches.
  struct Hold {
    uint64_t since = 0;  // when it began; 0: no request is deferred
    uint64_t limit = 0;  // the longest deferral, as last computed
  };
  // The time in which a thread waits for a result and the engine makes no progress.
  struct IdleWait {
    uint64_t since = 0;         // when it was first seen; 0: there is none
    uint64_t next_request = 0;  // when to ask other ranks for a flush
  };

  // Any thread.
  Doorbell& doorbell() const { return context_.own_block().doorbell; }
  bool is_waited_for() const { return context_.own_block().waits.load() > 0; }
  bool is_wanted() const;
  // The engine's own thread.
  void run();
  // Only the holder of the engine lock may call the rest.
  void work(WaitingParty worker, const std::function<bool()>& enough, uint64_t deadline) noexcept;
  void release(std::unique_lock<std::mutex> lock);
  void move_messages();
  Status step(bool* progressed);
  Status send(bool* progressed);
  bool has_work();
  uint32_t listening() const;  // the WakeReasons to wake up for
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
  std::atomic<bool> is_handed_over_{false};  // only the engine's own thread may resume the collective under way
  std::mutex engine_lock_;                   // taken while no other lock is held
  // Only the holder of the engine lock uses the rest.
  bool is_gpu_watched_ = false;  // the engine's own thread wakes up in time to check it
  Hold hold_;
  IdleWait idle_wait_;

  std::thread thread_;  // last: it uses all of the above
};

}  // namespace hvl
