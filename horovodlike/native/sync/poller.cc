#include "sync/poller.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/clock.h"

namespace hvl {

namespace {

Status failed(const std::string& what) {
  return Status(HVL_RESOURCES, "cannot " + what + ": " + strerror(errno) + "; see the limits of this process");
}

int control(int epoll, int operation, int fd, uint32_t events) {
  epoll_event event{};
  event.events = events;
  return epoll_ctl(epoll, operation, fd, &event);
}

int poll_for(std::vector<pollfd>* polled, uint64_t timeout) {
  const timespec limit{static_cast<time_t>(timeout / kSecond), static_cast<long>(timeout % kSecond)};
  return ppoll(polled->data(), polled->size(), &limit, nullptr) == -1 ? errno : 0;
}

}  // namespace

Poller::~Poller() {
  for (int fd : {pipe_, call_, news_, call_or_news_}) {
    if (fd != -1) close(fd);
  }
}

Status Poller::open(int pipe) {
  pipe_ = fcntl(pipe, F_DUPFD_CLOEXEC, 0);
  call_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  news_ = epoll_create1(EPOLL_CLOEXEC);
  call_or_news_ = epoll_create1(EPOLL_CLOEXEC);
  if (pipe_ == -1 || call_ == -1 || news_ == -1 || call_or_news_ == -1) return failed("open what wakes the engine");
  if (control(news_, EPOLL_CTL_ADD, pipe_, EPOLLIN) == -1 ||
      control(call_or_news_, EPOLL_CTL_ADD, call_, EPOLLIN) == -1 ||
      control(call_or_news_, EPOLL_CTL_ADD, news_, EPOLLIN) == -1) {
    return failed("watch what wakes the engine");
  }
  return Status();
}

Status Poller::watch(int fd) {
  return control(news_, EPOLL_CTL_ADD, fd, EPOLLIN) == -1 ? failed("watch a connection") : Status();
}

int Poller::sleep(uint64_t timeout) {
  const int result = poll_for(&polled_, timeout);
  drain();
  return result;
}

int Poller::sleep_idle(uint64_t timeout) {
  polled_.assign({pollfd{news_, POLLIN, 0}});
  return sleep(timeout);
}

int Poller::sleep_in_collective(const Sockets* sockets, uint64_t timeout) {
  polled_.assign({pollfd{pipe_, POLLIN, 0}});
  if (sockets != nullptr) sockets->add_to(&polled_);
  return sleep(timeout);
}

// Drains the pipe: a thread that is awake checks everything.
void Poller::drain() {
  char bytes[256];
  while (read(pipe_, bytes, sizeof bytes) == static_cast<ssize_t>(sizeof bytes)) {
  }
}

void Poller::sleep_engine_thread(uint64_t timeout) {
  std::vector<pollfd> polled{pollfd{call_or_news_, POLLIN, 0}};
  poll_for(&polled, timeout);
  uint64_t calls = 0;
  while (read(call_, &calls, sizeof calls) == -1 && errno == EINTR) {
  }
}

void Poller::call_engine_thread() {
  const uint64_t one = 1;
  while (write(call_, &one, sizeof one) == -1 && errno == EINTR) {
  }
}

void Poller::let_engine_thread_listen(bool listens) {
  control(call_or_news_, EPOLL_CTL_MOD, news_, listens ? static_cast<uint32_t>(EPOLLIN) : 0u);
  if (!listens) drain();
}

}  // namespace hvl
