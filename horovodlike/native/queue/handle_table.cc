#include "queue/handle_table.h"

#include <time.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/clock.h"

namespace hvl {

namespace {

constexpr uint64_t kPollInterval = 20 * kMicrosecond;
constexpr int kIndexBits = 24;
constexpr int64_t kIndexMask = (int64_t{1} << kIndexBits) - 1;

uint32_t index_of(int64_t handle) { return static_cast<uint32_t>(handle & kIndexMask); }
uint32_t generation_of(int64_t handle) { return static_cast<uint32_t>(handle >> kIndexBits); }

// True if the result is finished or has failed. The engine has some time to report an error of the device, since it
// names the rank to all ranks. If it has ended, or watches nothing in flight, this thread reports the error.
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

int64_t HandleTable::create() {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot* slot;
  return take_slot(&slot);
}

int64_t HandleTable::create_with_copy(size_t num_bytes, char** copy) {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot* slot;
  const int64_t handle = take_slot(&slot);
  try {
    if (num_bytes > slot->copy.size()) slot->copy.resize(num_bytes);
  } catch (...) {  // no memory
    slot->state.store(kComplete);
    release(handle, slot);
    throw;
  }
  slot->copied_bytes = num_bytes;
  *copy = slot->copy.data();
  return handle;
}

int64_t HandleTable::take_slot(Slot** taken) {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(slots_.size()));
    slots_.emplace_back();
  }
  uint32_t index = free_.back();
  free_.pop_back();
  Slot& slot = slots_[index];
  slot.used = true;
  slot.generation = (slot.generation + 1) & 0x7fffffff;
  if (slot.generation == 0) slot.generation = 1;  // a handle is > 0
  slot.state.store(kPending);
  *taken = &slot;
  return (static_cast<int64_t>(slot.generation) << kIndexBits) | index;
}

HandleTable::Slot* HandleTable::find(int64_t handle) {
  if (handle <= 0 || index_of(handle) >= slots_.size()) return nullptr;
  Slot& slot = slots_[index_of(handle)];
  return slot.used && slot.generation == generation_of(handle) ? &slot : nullptr;
}

void HandleTable::release(int64_t handle, Slot* slot) {
  slot->used = false;
  slot->status = Status();
  slot->outputs.clear();
  slot->copied_bytes = 0;
  free_.push_back(index_of(handle));
}

void HandleTable::complete(int64_t handle, Status status, std::vector<hvl_output> outputs, GpuResultPtr on_gpu,
                           const hvl_received& received) {
  Slot* slot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    slot = find(handle);
    slot->status = std::move(status);
    slot->outputs = std::move(outputs);
    slot->received = received;
    if (on_gpu != nullptr) {
      slot->on_gpu = std::move(on_gpu);
      num_on_gpu_.fetch_add(1);
    }
  }
  if (slot->state.exchange(kComplete) == kPendingWithWaiter) to_wake_.push_back(slot);
}

void HandleTable::wake_waiters() {
  // A slot may have been consumed and be in use again by now; waking its next user once too often does no harm.
  for (Slot* slot : to_wake_) futex_wake(&slot->state, INT_MAX, FutexScope::kProcess);
  to_wake_.clear();
}

hvl_status HandleTable::poll(int64_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot* slot = find(handle);
  if (slot == nullptr) return HVL_UNKNOWN_HANDLE;
  return slot->state.load() == kComplete ? HVL_OK : HVL_IN_PROGRESS;
}

hvl_status HandleTable::wait(int64_t handle, uint64_t deadline) {
  Slot* slot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    slot = find(handle);
    if (slot == nullptr) return HVL_UNKNOWN_HANDLE;
  }
  while (slot->state.load() != kComplete) {
    uint64_t now = now_ns();
    if (now >= deadline) return HVL_IN_PROGRESS;
    uint32_t pending = kPending;
    if (!slot->state.compare_exchange_strong(pending, kPendingWithWaiter) && pending == kComplete) break;
    if (futex_wait(&slot->state, kPendingWithWaiter, deadline - now, FutexScope::kProcess) == EINTR) {
      return slot->state.load() == kComplete ? HVL_OK : HVL_IN_PROGRESS;
    }
  }
  return HVL_OK;
}

GpuResultPtr HandleTable::result_on_gpu(int64_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Slot* slot = find(handle);
  return slot != nullptr ? slot->on_gpu : nullptr;
}

hvl_status HandleTable::wait_for_results(const int64_t* handles, size_t count, uint64_t deadline, bool has_engine) {
  if (!has_results_on_gpu()) return HVL_OK;
  for (size_t left = count; left > 0; --left) {  // the last one first: the others finish before it
    const GpuResultPtr result = result_on_gpu(handles[left - 1]);
    while (result != nullptr && !is_there(result.get(), has_engine)) {
      if (now_ns() >= deadline) return HVL_IN_PROGRESS;
      const timespec pause{0, static_cast<long>(kPollInterval)};
      if (nanosleep(&pause, nullptr) == -1 && errno == EINTR) return HVL_IN_PROGRESS;
    }
  }
  return HVL_OK;
}

Status HandleTable::hold_up_for_results(const int64_t* handles, size_t count, CudaStream stream, uint64_t deadline,
                                        bool has_engine) {
  if (!has_results_on_gpu()) return Status();
  GpuResultPtr last;
  Status status;
  for (size_t index = 0; index < count; ++index) {
    GpuResultPtr result = result_on_gpu(handles[index]);
    if (result == nullptr || result == last) continue;  // requests of one batch share a result
    if (status.ok()) status = result->done().hold_up_callers(stream);
    last = std::move(result);
  }
  if (status.ok() || status.code() == HVL_INVALID_ARGUMENT) return status;
  const bool are_there = wait_for_results(handles, count, deadline, has_engine) == HVL_OK;
  return are_there ? status : Status(HVL_IN_PROGRESS, status.message());
}

Status HandleTable::consume(int64_t handle, std::vector<hvl_output>* outputs, hvl_received* received) {
  GpuResultPtr on_gpu;  // destroyed after the unlock
  std::lock_guard<std::mutex> lock(mutex_);
  Slot* slot = find(handle);
  if (slot == nullptr) return Status(HVL_UNKNOWN_HANDLE, "the handle is unknown or was waited for already");
  Status status = std::move(slot->status);
  *outputs = std::move(slot->outputs);
  if (received != nullptr) *received = slot->received;
  if (slot->on_gpu != nullptr) {
    on_gpu = std::move(slot->on_gpu);
    num_on_gpu_.fetch_sub(1);
    if (status.ok()) status = on_gpu->failure();
  }
  release(handle, slot);
  return status;
}

Status HandleTable::consume_all(int64_t* handles, size_t count) {
  Status first;
  for (size_t index = 0; index < count; ++index) {
    if (handles[index] == 0) continue;
    std::vector<hvl_output> dropped;
    const Status status = consume(std::exchange(handles[index], 0), &dropped);
    for (const hvl_output& output : dropped) free(output.data);
    if (first.ok()) first = status;
  }
  return first;
}

hvl_status HandleTable::take_copy(int64_t handle, char* result, Status* status) {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot* slot = find(handle);
  if (slot == nullptr || slot->copied_bytes == 0) return HVL_UNKNOWN_HANDLE;
  if (slot->state.load() != kComplete) return HVL_IN_PROGRESS;
  *status = std::move(slot->status);
  if (status->ok()) memcpy(result, slot->copy.data(), slot->copied_bytes);
  release(handle, slot);
  return HVL_OK;
}

void HandleTable::discard(int64_t handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  Slot* slot = find(handle);
  slot->state.store(kComplete);
  release(handle, slot);
}

}  // namespace hvl
