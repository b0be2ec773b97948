// Sleeping for the threads of a rank that also waits for sockets: in poll(), where a notification is a byte in a pipe.
//
// The engine's own thread sleeps on a call from another thread of this process, and, unless another thread does the
// engine's work, on the wake-up pipe and the control connections. A thread that waits for a result and does that work
// meanwhile takes these over, so that nothing wakes the engine's thread in vain.
#pragma once

#include <poll.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace hvl {

// The sockets of a collective under way.
class Sockets {
 public:
  virtual ~Sockets() = default;
  // Appends the descriptors to wait for.
  virtual void add_to(std::vector<pollfd>* polled) const = 0;
  // The awaited ranks, as text for messages; empty: none.
  virtual std::string awaited() const = 0;
  // Called periodically while a collective waits. Returns an error if the host of a peer does not answer.
  virtual Status check_answered() const = 0;
};

class Poller {
 public:
  Poller() = default;
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // `pipe`: the read end of this rank's wake-up pipe; a duplicate is used.
  Status open(int pipe);
  // From now on, input on this descriptor ends an idle sleep, until it is closed.
  Status watch(int fd);

  // Called by the thread that has armed the doorbell. Sleeps until a notification, input on a watched descriptor, or
  // `timeout` nanoseconds later; returns EINTR after a signal.
  int sleep_idle(uint64_t timeout);
  // As sleep_idle(), while a collective is under way: wakes for its sockets instead of the watched descriptors.
  int sleep_in_collective(const Sockets* sockets, uint64_t timeout);

  // The engine's own thread: sleeps until it is called, or an event that it listens to happens.
  void sleep_engine_thread(uint64_t timeout);
  void call_engine_thread();
  // Sets whether the engine's own thread listens to the pipe and the watched descriptors.
  void let_engine_thread_listen(bool listens);

 private:
  int sleep(uint64_t timeout);
  void drain();

  int pipe_ = -1;
  int call_ = -1;          // an eventfd
  int news_ = -1;          // an epoll of the pipe and the watched descriptors
  int call_or_news_ = -1;  // an epoll of the call and, while the engine's own thread listens, the news
  std::vector<pollfd> polled_;
};

}  // namespace hvl
