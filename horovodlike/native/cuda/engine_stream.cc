#include "cuda/engine_stream.h"

#include <time.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/memory.h"

namespace hvl {

namespace {

constexpr uint64_t kPollInterval = 50 * kMicrosecond;

}  // namespace

bool poll_until(const std::function<bool()>& condition) {
  const uint64_t deadline = now_ns() + kLeaveTimeout;
  while (!condition()) {
    if (now_ns() >= deadline) return false;
    const timespec pause{0, static_cast<long>(kPollInterval)};
    nanosleep(&pause, nullptr);
  }
  return true;
}

Status EngineStream::open() { return broken(gpu_->make_stream(&stream_)); }

Status EngineStream::broken(const Status& status) const {
  if (status.ok() || status.code() == HVL_IN_PROGRESS || status.code() == HVL_JOB_BROKEN) return status;
  return Status(HVL_JOB_BROKEN, who_ + ": " + status.message());
}

void EngineStream::begin() {
  result_ = nullptr;
  ready_.clear();
}

Status EngineStream::hold_until_ready(const GpuRequest& request) {
  if (request.ready == last_ready_) return Status();
  last_ready_ = request.ready;
  ready_.push_back(request.ready);
  return broken(request.ready->hold_up(stream_));
}

Status EngineStream::hold_until_now(const GpuRequest& request) {
  GpuEventPtr now;
  Status status = gpu_->record_callers(request.stream, &now);
  if (status.code() == HVL_INVALID_ARGUMENT) return Status();  // it is being captured: no memory is freed on it
  return broken(status.ok() ? now->hold_up(stream_) : status);
}

Status EngineStream::end(std::shared_ptr<PinnedMemory> memory) {
  GpuEventPtr done;
  Status status = gpu_->record(stream_, &done);
  if (!status.ok()) return broken(status);
  result_ = std::make_shared<GpuResult>(std::move(done));
  if (in_flight_.empty()) progressed_at_ = now_ns();
  in_flight_.push_back({result_, std::move(memory), name_, ready_});
  return status;
}

Status EngineStream::check() {
  Status status;
  bool done = true;
  while (status.ok() && done && !in_flight_.empty()) {
    status = in_flight_.front().result->done().query(&done);
    if (!status.ok() || !done) break;
    in_flight_.pop_front();
    progressed_at_ = now_ns();
    warned_ = false;
  }
  return broken(status);
}

Status EngineStream::check_stall() {
  if (in_flight_.empty()) return Status();
  return waiter_->report_stall(now_ns() - progressed_at_, &warned_, [this] { return describe_stall(); });
}

Stall EngineStream::describe_stall() const {
  const InFlight& first = in_flight_.front();
  const bool is_ready = std::all_of(first.ready.begin(), first.ready.end(), [](const GpuEventPtr& ready) {
    bool done = false;
    return ready->query(&done).ok() && done;
  });
  return {who_, first.name,
          is_ready ? "it waits for the GPUs of other ranks, or NCCL hangs"
                   : "the stream that makes the tensors is not done with what it was given before"};
}

void EngineStream::fail(const Status& why) {
  size_t num_failed = 0;
  for (const InFlight& each : in_flight_) {
    bool done = false;
    if (each.result->done().query(&done).ok() && done) continue;
    each.result->fail(why);
    ++num_failed;
  }
  if (num_failed == 0) return;
  // Logged, as perhaps only streams wait for these results, and no thread sees the error.
  log(LogLevel::kError, who_ + " was not done with " + std::to_string(num_failed) +
                            " batches when the job broke: the tensors of their results are not to be used");
}

bool EngineStream::drain() const {
  GpuEventPtr end;
  if (stream_ == nullptr || !gpu_->record(stream_, &end).ok()) return true;  // a failed device does no more work
  return poll_until([&] {
    bool done = false;
    return !end->query(&done).ok() || done;
  });
}

void EngineStream::let_go(bool has_ended) {
  for (const InFlight& each : in_flight_) each.result->let_go();
  if (has_ended) {
    in_flight_.clear();
  } else {
    log(LogLevel::kWarning, "the GPU does not get on with what it was given before the job broke");
  }
}

void EngineStream::close(bool has_ended) {
  if (stream_ == nullptr) return;
  if (has_ended) {
    in_flight_.clear();
    gpu_->destroy_stream(stream_);
  } else {
    leak(new std::deque<InFlight>(std::move(in_flight_)));
  }
}

}  // namespace hvl
