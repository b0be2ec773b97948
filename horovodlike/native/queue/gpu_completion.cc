#include "queue/gpu_completion.h"

#include <time.h>

#include <cerrno>

#include "base/clock.h"

namespace hvl {

namespace {

constexpr uint64_t kPollInterval = 20 * kMicrosecond;
constexpr uint64_t kTimeToSayWhy = 300 * kMillisecond;

// Also if it failed. The engine finds an error of the device, too, breaks the job and tells all ranks whose device it
// is. But not if there is no engine any more, or nothing in flight that it watches: then this thread reports it.
bool is_there(GpuResult* result, bool has_engine) {
  bool done = false;
  const Status status = result->done().query(&done);
  if (!result->failure().ok()) return result->is_over();  // until then the memory is in use
  if (status.ok() && done) return true;
  if (status.ok()) return false;
  const uint64_t since = result->done().failing_since();
  if (has_engine && (since == 0 || now_ns() - since < kTimeToSayWhy)) return false;
  result->fail(Status(HVL_JOB_BROKEN, status.message()));
  result->let_go();
  return true;
}

}  // namespace

hvl_status wait_for_results(HandleTable* table, const int64_t* handles, size_t count, uint64_t deadline,
                            bool has_engine) {
  if (!table->has_results_on_gpu()) return HVL_OK;
  for (size_t left = count; left > 0; --left) {  // the last one first: the others are there before
    const GpuResultPtr result = table->result_on_gpu(handles[left - 1]);
    while (result != nullptr && !is_there(result.get(), has_engine)) {
      if (now_ns() >= deadline) return HVL_IN_PROGRESS;
      const timespec pause{0, static_cast<long>(kPollInterval)};
      if (nanosleep(&pause, nullptr) == -1 && errno == EINTR) return HVL_IN_PROGRESS;
    }
  }
  return HVL_OK;
}

Status hold_up_for_results(HandleTable* table, const int64_t* handles, size_t count, CudaStream stream,
                           uint64_t deadline, bool has_engine) {
  if (!table->has_results_on_gpu()) return Status();
  GpuResultPtr last;
  Status status;
  for (size_t index = 0; index < count; ++index) {
    GpuResultPtr result = table->result_on_gpu(handles[index]);
    if (result == nullptr || result == last) continue;  // those of one batch have the same
    if (status.ok()) status = result->done().hold_up_callers(stream);
    last = std::move(result);
  }
  if (status.ok() || status.code() == HVL_INVALID_ARGUMENT) return status;
  const bool is_there = wait_for_results(table, handles, count, deadline, has_engine) == HVL_OK;
  return is_there ? status : Status(HVL_IN_PROGRESS, status.message());
}

}  // namespace hvl
