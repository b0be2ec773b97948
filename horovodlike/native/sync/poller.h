// How the threads of a rank sleep that waits for sockets, too: in poll(), where a ring is a byte in a pipe.
//
// The engine's own thread sleeps on two things: a call from another thread of this process, and, while it is on duty,
// the bell and the control connections. A thread that waits for a result and does the engine's work meanwhile takes
// them away from it, so that nothing wakes it in vain.
#pragma once

#include <poll.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace hvl {

// Sockets that a collective under way has to do with.
class Sockets {
 public:
  virtual ~Sockets() = default;
  // Appends what is to be waited for.
  virtual void add_to(std::vector<pollfd>* polled) const = 0;
  // The ranks that are waited for, for messages; empty: none.
  virtual std::string awaited() const = 0;
  // Called now and then. An error: a peer's host is silent.
  virtual Status check_answered() const = 0;
};

class Poller {
 public:
  Poller() = default;
  ~Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // `bell`: the end to read from of this rank's pipe; a duplicate is used.
  Status open(int bell);
  // News on this descriptor end an idle sleep from now on, until it is closed.
  Status watch(int fd);

  // For who is on duty. Sleeps until the bell rings, there are news or `timeout` nanoseconds are over; returns EINTR
  // after a signal.
  int sleep_idle(uint64_t timeout);
  // The same while a collective is under way: news are of no interest, its sockets are.
  int sleep_in_collective(const Sockets* sockets, uint64_t timeout);

  // The engine's own thread: sleeps until it is called, or what it listens to has happened.
  void sleep_engine_thread(uint64_t timeout);
  void call_engine_thread();
  // Whether the engine's own thread hears the bell and the news.
  void let_engine_thread_listen(bool listens);

 private:
  int sleep(uint64_t timeout);
  void silence();

  int bell_ = -1;
  int call_ = -1;  // an eventfd
  int news_ = -1;  // an epoll of the bell and the descriptors that are watched
  int duty_ = -1;  // an epoll of the call and, while the engine's own thread listens, the news
  std::vector<pollfd> polled_;
};

}  // namespace hvl
