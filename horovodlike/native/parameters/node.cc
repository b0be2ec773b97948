#include "parameters/node.h"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/clock.h"
#include "sync/spinner.h"

namespace hvl {

namespace {

constexpr uint64_t kSpin = 50 * kMicrosecond;
constexpr uint64_t kAnswerCheck = 250 * kMillisecond;  // between two looks for hosts that do not answer
constexpr uint64_t kPoll = 100 * kMicrosecond;         // between two looks at the sockets while there is other work
constexpr int kLongestSleep = 500;                     // milliseconds: bounds a wake-up that was lost with its sender

int make_call() {
  const int call = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (call == -1) throw std::runtime_error(std::string("cannot start parameter servers: ") + strerror(errno));
  return call;
}

// Signals are for other threads; one for a closed socket is for none.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
}

}  // namespace

ParameterNode::ParameterNode(HandleTable* handles)
    : handles_(*handles), call_(make_call()), loop_(handles, call_, &peers_mutex_), thread_([this] { run(); }) {}

ParameterNode::~ParameterNode() {
  stop();
  close(call_);
}

template <typename Add>
bool ParameterNode::call(Add&& add) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_stopped_) return false;
    add(&calls_);
    has_calls_.store(true);
  }
  if (!is_asleep_.exchange(false)) return true;
  const uint64_t one = 1;
  while (write(call_, &one, sizeof one) == -1 && errno == EINTR) {
  }
  return true;
}

void ParameterNode::add_client(PeerConnection connection) {
  call([&](Calls* calls) { calls->connections.emplace_back(std::move(connection), 0); });
}

int64_t ParameterNode::add_server(PeerConnection connection) {
  const int64_t server = next_server_.fetch_add(1);
  call([&](Calls* calls) { calls->connections.emplace_back(std::move(connection), server); });
  return server;
}

void ParameterNode::remove_server(int64_t server) {
  call([&](Calls* calls) { calls->functions.emplace_back([this, server] { loop_.remove_server(server); }); });
}

void ParameterNode::set_user_rules(const UserRules& rules) {
  call([&](Calls* calls) { calls->functions.emplace_back([this, rules] { loop_.set_user_rules(rules); }); });
}

Status ParameterNode::start(std::unique_ptr<ClientRequest> request, int64_t* handle) {
  *handle = request->handle = handles_.create();
  if (call([&](Calls* calls) { calls->requests.push_back(std::move(request)); })) return Status();
  handles_.discard(*handle);
  return Status(HVL_SHUT_DOWN, "this process has stopped its parameter servers and clients");
}

void ParameterNode::stop() {
  if (!thread_.joinable()) return;
  must_stop_.store(true);
  call([](Calls*) {});
  thread_.join();
}

void ParameterNode::lock() {
  mutex_.lock();
  peers_mutex_.lock();
}

void ParameterNode::unlock() {
  peers_mutex_.unlock();
  mutex_.unlock();
}

void ParameterNode::close_in_child() {
  close(call_);
  for (auto& [connection, server] : calls_.connections) connection.close_in_child();
  loop_.close_in_child();
}

void ParameterNode::run() {
  pthread_setname_np(pthread_self(), "hvl-parameters");
  block_signals();
  uint64_t checked = now_ns(), polled = checked;
  while (!must_stop_.load()) {
    take_calls(false);
    const uint64_t now = now_ns();
    if (now - polled >= kPoll) {
      loop_.find_ready(0);
      polled = now;
    }
    if (now - checked >= kAnswerCheck) {
      loop_.check_answered();
      checked = now;
    }
    if (loop_.progress()) continue;
    uint64_t ignored = 0;
    const bool finds_work =
        is_dense_ && spin_until([this] { return has_work(); }, kSpin, true, &ignored) != Spin::kInVain;
    if (!finds_work) sleep();
  }
  take_calls(false);
  loop_.stop();
  take_calls(true);  // connections that came last, and requests, which fail
  loop_.stop();
}

void ParameterNode::take_calls(bool is_last) {
  if (!has_calls_.load() && !is_last) return;
  Calls calls;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    const std::lock_guard<std::mutex> peers_lock(peers_mutex_);  // fork() finds each connection here or there
    std::swap(calls, calls_);
    has_calls_.store(false);
    is_stopped_ = is_last;
    lock.unlock();
    for (auto& [connection, server] : calls.connections) {
      server > 0 ? loop_.add_server(std::move(connection), server) : loop_.add_client(std::move(connection));
    }
  }
  for (const std::function<void()>& function : calls.functions) function();
  for (std::unique_ptr<ClientRequest>& request : calls.requests) loop_.begin(std::move(request));
}

bool ParameterNode::has_work() {
  if (has_calls_.load() || loop_.can_progress()) return true;
  loop_.find_ready(0);
  return loop_.can_progress();
}

// A thread that calls, or a peer, changes the state that this thread checks, and then checks whether to wake it.
void ParameterNode::sleep() {
  const uint64_t begin = now_ns();
  loop_.arm();
  is_asleep_.store(true);
  if (!has_calls_.load() && !loop_.can_progress()) loop_.find_ready(kLongestSleep);
  is_asleep_.store(false);
  loop_.disarm();
  uint64_t calls = 0;
  while (read(call_, &calls, sizeof calls) == -1 && errno == EINTR) {
  }
  is_dense_ = now_ns() - begin < 2 * kSpin;
}

}  // namespace hvl
