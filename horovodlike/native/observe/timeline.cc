#include "observe/timeline.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/json.h"
#include "base/log.h"

namespace hvl {

namespace {

constexpr size_t kMaxUnwritten = 32 << 20;  // bytes; more events are dropped, as the engine must not wait
constexpr auto kWriteInterval = std::chrono::milliseconds(50);
constexpr const char* kEnd = "\n]\n";

std::string upper_case(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return static_cast<char>(toupper(c)); });
  return text;
}

std::string shape_of(const TensorSignature& tensor) {
  std::string text;
  for (int64_t extent : tensor.shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  return "[" + text + "]";
}

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

std::string arguments_of(const Operation& operation, uint64_t number, int num_ranks) {
  const Signature& signature = operation.signature;
  std::string text = "\"args\": {\"collective\": " + std::to_string(number) +
                     ", \"ranks\": " + std::to_string(num_ranks) +
                     ", \"bytes\": " + std::to_string(operation.total_bytes);
  if (signature.device != HVL_CPU) text += ", \"device\": \"gpu\"";
  if (!signature.tensors.empty()) {
    const TensorSignature& first = signature.tensors.front();
    text += ", \"dtype\": " + quoted(name_of(first.dtype)) + ", \"shape\": " + quoted(shape_of(first));
  }
  return text + "}";
}

}  // namespace

Status Timeline::start(const std::string& path, bool mark_cycles) {
  stop();
  std::lock_guard<std::mutex> control(control_);
  if (writer_.joinable()) return Status(HVL_INVALID_ARGUMENT, "another thread has started a timeline");
  file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ == -1) {
    return Status(HVL_INVALID_ARGUMENT, "cannot write the timeline '" + path + "': " + strerror(errno));
  }
  written_ = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = false;
    mark_cycles_ = mark_cycles;
    started_ = now_ns();
    num_dropped_ = 0;
    rows_.clear();
    open_.clear();
    events_ = "[";
    add("{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": 0, \"args\": {\"name\": \"rank " +
        std::to_string(place_.rank) + "\", \"rank\": " + std::to_string(place_.rank) +
        ", \"size\": " + std::to_string(place_.size) + ", \"host\": " + quoted(host_name()) +
        ", \"start_time_since_epoch_in_micros\": " + std::to_string(EpochClock().nanoseconds(started_) / kMicrosecond) +
        "}}");
  }
  sigset_t all, before;  // the thread inherits the mask: signals are for the framework's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  writer_ = std::thread([this] { write_on(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  is_on_.store(true);
  return Status();
}

void Timeline::stop() {
  std::lock_guard<std::mutex> control(control_);
  if (!writer_.joinable()) return;
  is_on_.store(false);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    end_open(now_ns());  // ends collectives whose results may be complete already
    stopping_ = true;
  }
  wakes_.notify_all();
  writer_.join();
  close(file_);
  if (num_dropped_ == 0) return;
  log(LogLevel::kWarning,
      "the timeline lacks " + std::to_string(num_dropped_) + " events: they came faster than they could be written");
}

void Timeline::add_begin(const std::vector<NamedTensor*>& tensors, uint64_t number, int num_ranks, uint64_t now) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return;
  if (mark_cycles_) {
    add("{\"ph\": \"i\", \"s\": \"g\", \"name\": \"CYCLE_START\", \"pid\": 0, \"tid\": " + std::to_string(place_.rank) +
        ", \"ts\": " + time_of(now) + "}");
  }
  for (const NamedTensor* tensor : tensors) {
    const Signature& signature = tensor->request->signature();
    const std::string kind = upper_case(name_of(signature.kind));
    const int row = row_of(signature.name);
    add_span("\"name\": \"NEGOTIATE_" + kind + "\"", row, std::max(tensor->request->enqueued_at, started_), now);
    open_.push_back(
        {row, "\"name\": \"" + kind + "\", " + arguments_of(*tensor->request->operation, number, num_ranks), now});
  }
}

void Timeline::add_end(uint64_t now) {
  std::lock_guard<std::mutex> lock(mutex_);
  end_open(now);
}

void Timeline::end_open(uint64_t now) {
  for (const Open& open : open_) add_span(open.text, open.row, open.begun, now);
  open_.clear();
}

void Timeline::add(std::string event) {
  if (events_.size() > kMaxUnwritten) {
    ++num_dropped_;
    return;
  }
  events_ += events_ == "[" ? "\n" : ",\n";
  events_ += event;
}

void Timeline::add_span(const std::string& what, int row, uint64_t begun, uint64_t ended) {
  add("{\"ph\": \"X\", " + what + ", \"pid\": " + std::to_string(row) + ", \"tid\": " + std::to_string(place_.rank) +
      ", \"ts\": " + time_of(begun) + ", \"dur\": " + time_of(started_ + (ended - std::min(begun, ended))) + "}");
}

int Timeline::row_of(const std::string& name) {
  const auto [found, is_new] = rows_.emplace(name, static_cast<int>(rows_.size()) + 1);
  if (is_new) {
    const std::string row = std::to_string(found->second);
    add("{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": " + row + ", \"args\": {\"name\": " + quoted(name) +
        "}}");
    add("{\"ph\": \"M\", \"name\": \"process_sort_index\", \"pid\": " + row + ", \"args\": {\"sort_index\": " + row +
        "}}");
  }
  return found->second;
}

// Microseconds since the start.
std::string Timeline::time_of(uint64_t time) const {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", static_cast<double>(time - std::min(time, started_)) / kMicrosecond);
  return text;
}

void Timeline::write_on() {
  pthread_setname_np(pthread_self(), "hvl-timeline");
  bool stopping = false;
  while (!stopping) {
    std::string events;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wakes_.wait_for(lock, kWriteInterval, [this] { return stopping_; });
      stopping = stopping_;
      events.swap(events_);
    }
    if (!events.empty()) write(events);
  }
}

void Timeline::write(const std::string& events) {
  const std::string text = events + kEnd;
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t length = pwrite(file_, text.data() + done, text.size() - done, written_ + static_cast<int64_t>(done));
    if (length <= 0) return;  // a full disk: the next events go to the same place
    done += static_cast<size_t>(length);
  }
  written_ += static_cast<int64_t>(events.size());
}

}  // namespace hvl
