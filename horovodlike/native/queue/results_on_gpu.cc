#include "queue/results_on_gpu.h"

#include <time.h>

#include <cerrno>

#include "base/clock.h"

namespace hvl {

namespace {

constexpr uint64_t kPollInterval = 20 * kMicrosecond;

// An error of the device is found by the engine, too, which breaks the job: the result fails then.
bool is_there(const GpuResult& result) {
  bool done = false;
  const bool knows = result.done().query(&done).ok();
  return !result.failure().ok() || (knows && done);
}

}  // namespace

hvl_status wait_for_results(HandleTable* table, const int64_t* handles, size_t count, uint64_t deadline) {
  if (!table->has_results_on_gpu()) return HVL_OK;
  for (size_t left = count; left > 0; --left) {  // the last one first: the others are there before
    const GpuResultPtr result = table->result_on_gpu(handles[left - 1]);
    while (result != nullptr && !is_there(*result)) {
      if (now_ns() >= deadline) return HVL_IN_PROGRESS;
      const timespec pause{0, static_cast<long>(kPollInterval)};
      if (nanosleep(&pause, nullptr) == -1 && errno == EINTR) return HVL_IN_PROGRESS;
    }
  }
  return HVL_OK;
}

Status hold_up_for_results(HandleTable* table, const int64_t* handles, size_t count, CudaStream stream) {
  if (!table->has_results_on_gpu()) return Status();
  GpuResultPtr last;
  Status status;
  for (size_t index = 0; index < count; ++index) {
    GpuResultPtr result = table->result_on_gpu(handles[index]);
    if (result == nullptr || result == last) continue;  // those of one batch have the same
    if (status.ok()) status = result->done().hold_up(stream);
    last = std::move(result);
  }
  return status;
}

}  // namespace hvl
