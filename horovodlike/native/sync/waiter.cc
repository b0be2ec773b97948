#include "sync/waiter.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <utility>

#include "base/log.h"

namespace hvl {

namespace {

constexpr uint64_t kCheckInterval = 20 * kMillisecond;
// The pause between two checks of a condition that must be polled. None at first: most waits end soon.
constexpr uint64_t kPollSpin = kMillisecond;
constexpr uint64_t kPollInterval = 50 * kMicrosecond;

}  // namespace

char state_of(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const size_t end_of_name = text.rfind(')');  // the name may contain any character
  return end_of_name != std::string::npos && end_of_name + 2 < text.size() ? text[end_of_name + 2] : '?';
}

bool is_stopped(int pid) {
  const char state = state_of(pid);
  return state == 'T' || state == 't';
}

Waiter::Waiter(std::shared_ptr<HostMemory> memory, WaiterOptions options)
    : memory_(std::move(memory)),
      options_(std::move(options)),
      spinner_(memory_.get(), options_.local_rank, options_.processors) {
  pidfds_.assign(static_cast<size_t>(memory_->shape().ranks), -1);
  for (size_t peer = 0; peer < options_.pids.size(); ++peer) {
    if (static_cast<int>(peer) == options_.local_rank) continue;
    pidfds_[peer] = static_cast<int>(syscall(SYS_pidfd_open, options_.pids[peer], 0));
    if (pidfds_[peer] == -1 && errno == ESRCH) memory_->break_job(describe(static_cast<int>(peer)) + " has ended");
    if (pidfds_[peer] == -1 && errno != ESRCH) {
      log(LogLevel::kWarning, "cannot watch " + describe(static_cast<int>(peer)) + ": if it is killed, only " +
                                  "HOROVODLIKE_STALL_SHUTDOWN_TIME_SECONDS will end the job");
    }
  }
}

Waiter::~Waiter() {
  for (int pidfd : pidfds_) {
    if (pidfd != -1) close(pidfd);
  }
}

std::string Waiter::describe(int local_rank) const {
  size_t index = static_cast<size_t>(local_rank);
  std::string text = "rank " + std::to_string(options_.ranks[index]);
  if (index < options_.pids.size()) text += " (pid " + std::to_string(options_.pids[index]) + ")";
  return text;
}

bool Waiter::check_peers() {
  uint64_t now = now_ns();
  if (now - last_check_ < kCheckInterval) return false;
  last_check_ = now;
  options_.check_other_hosts();
  for (size_t peer = 0; peer < pidfds_.size(); ++peer) {
    if (pidfds_[peer] == -1) continue;
    pollfd ended{pidfds_[peer], POLLIN, 0};
    if (poll(&ended, 1, 0) != 1) continue;
    close(pidfds_[peer]);
    pidfds_[peer] = -1;
    int local_rank = static_cast<int>(peer);
    if (memory_->rank(local_rank).left.load() == 0) {
      memory_->break_job(describe(local_rank) +
                         " has ended without shutting down: it was killed, or it exited in a "
                         "way that runs no exit handlers");
    }
  }
  return true;
}

std::string Waiter::describe_peers(const std::function<bool(int)>& is_meant) const {
  std::string text;
  for (int peer = 0; peer < memory_->shape().ranks; ++peer) {
    if (peer != options_.local_rank && is_meant(peer)) text += (text.empty() ? "" : ", ") + describe(peer);
  }
  return text;
}

std::string Waiter::name_laggards(const std::function<bool(int)>& lags, const Sockets* sockets) const {
  std::string text = describe_peers(lags);
  if (text.empty()) {
    // A stopped rank of this host also holds up the other hosts, so it is the likelier cause: only it is named.
    const std::string stopped = describe_peers([this](int peer) {
      const size_t index = static_cast<size_t>(peer);
      return index < options_.pids.size() && is_stopped(options_.pids[index]);
    });
    if (!stopped.empty()) return stopped;
  }
  const std::string remote = sockets != nullptr ? sockets->awaited() : std::string();
  if (!remote.empty()) text += (text.empty() ? "" : ", ") + remote;
  return text;
}

Status Waiter::report_stall(uint64_t waited, bool* warned, const std::function<Stall()>& describe) const {
  const bool warn = options_.stall_warning > 0 && waited > to_ns(options_.stall_warning) && !*warned;
  const bool end = options_.stall_shutdown > 0 && waited > to_ns(options_.stall_shutdown);
  if (!warn && !end) return Status();
  const Stall stall = describe();
  const std::string text = stall.who + " did not get on with " + stall.what + ", for " +
                           std::to_string(waited / kSecond) + " s: " + stall.why;
  if (warn) log(LogLevel::kWarning, text);
  *warned |= warn;
  return end ? Status(HVL_JOB_BROKEN, "stalled: " + text) : Status();
}

void Waiter::check_stall(uint64_t patience, const std::function<Stall()>& describe) {
  const uint64_t now = now_ns();
  const uint64_t since = std::max(vain_.since, memory_->moved_at()) + patience;
  const Status status = report_stall(now - std::min(now, since), &vain_.warned, describe);
  if (!status.ok()) memory_->break_job(status.message());
}

// Ranks that wait for this one cannot see its bytes move. Short transfers are not worth a word.
void Waiter::note_moved() {
  const uint64_t now = now_ns();
  if (first_moved_ == 0) first_moved_ = now;
  if (now - first_moved_ >= kMovedInterval) memory_->header().moved_here.store(now);
}

void Waiter::check_leaving() {
  if (options_.leaving == nullptr || !options_.leaving->load()) return;
  uint64_t now = now_ns();
  if (vain_.leaving_since == 0) vain_.leaving_since = now;
  if (now - vain_.leaving_since > options_.leave_timeout) {
    memory_->break_job(describe(options_.local_rank) + " shut down while others were stuck in a collective");
  }
}

Status Waiter::sleep_until(const std::function<bool()>& condition, const std::function<bool(int)>& lags,
                           const Sockets* sockets) {
  const uint64_t start = now_ns();
  if (vain_.since == 0) vain_.since = start;
  Status status = sleep_in_vain(condition, lags, sockets);
  if (status.ok()) vain_ = {};
  waited_.fetch_add(now_ns() - start, std::memory_order_relaxed);
  return status;
}

Status Waiter::wait_polling(const std::function<bool()>& condition, const std::function<std::string()>& who) {
  return poll_until(condition, [&] {
    check_leaving();
    check_stall(0, [&] { return Stall{who()}; });
  });
}

Status Waiter::wait_for_device(const std::function<bool()>& condition, const std::function<Stall()>& describe) {
  return poll_until(condition, [&] { check_stall(0, describe); });
}

Status Waiter::poll_until(const std::function<bool()>& condition, const std::function<void()>& check) {
  const uint64_t start = now_ns();
  if (vain_.since == 0) vain_.since = start;
  Status status;
  if (!spinner_.spin_for(kPollSpin, condition)) {
    options_.before_sleep();
    while (!condition()) {
      if (memory_->is_broken()) {
        status = Status(HVL_JOB_BROKEN, memory_->broken_text());
        break;
      }
      if (is_interrupted() || has_enough()) {
        status = Status(HVL_IN_PROGRESS, "interrupted");
        break;
      }
      sleep_with([&](uint64_t limit) { return options_.poller->sleep_in_collective(nullptr, limit); }, kWakeProgress,
                 [this] { return memory_->is_broken(); }, kPollInterval);
      check_peers();
      check();
    }
  }
  if (status.code() != HVL_IN_PROGRESS) vain_ = {};
  waited_.fetch_add(now_ns() - start, std::memory_order_relaxed);
  return status;
}

Status Waiter::sleep_in_vain(const std::function<bool()>& condition, const std::function<bool(int)>& lags,
                             const Sockets* sockets) {
  Status status;
  while (status.ok() && !condition()) {
    if (memory_->is_broken()) return Status(HVL_JOB_BROKEN, memory_->broken_text());
    if (is_interrupted() || has_enough()) return Status(HVL_IN_PROGRESS, "interrupted");
    options_.before_sleep();
    sleep_with([&](uint64_t limit) { return options_.poller->sleep_in_collective(sockets, limit); }, kWakeProgress,
               [&] { return condition() || memory_->is_broken(); }, kCheckInterval);
    if (check_peers() && sockets != nullptr) status = sockets->check_answered();
    check_leaving();
    // A rank that waits for a rank of its own host knows which one, and must report first: other hosts wait for this
    // rank.
    const uint64_t patience = sockets != nullptr && describe_peers(lags).empty() ? kSecond : 0;
    check_stall(patience, [&] { return Stall{name_laggards(lags, sockets)}; });
  }
  return status;
}

}  // namespace hvl
