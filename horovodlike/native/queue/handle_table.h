// Handles: they pass the completion of a request to the threads that wait for it.
//
// Life of a handle: pending -> (waited for) -> complete -> consumed. complete() is called once by the engine,
// the other functions by any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "cuda/gpu.h"
#include "hvl.h"

namespace hvl {

class HandleTable {
 public:
  int64_t create();
  // As create(), with `num_bytes` of memory for a copy of the input. *copy is valid until the handle is consumed.
  int64_t create_with_copy(size_t num_bytes, char** copy);
  // Takes over `outputs`, to be freed with hvl_free by the consumer of the handle. Threads that wait stay asleep until
  // wake_waiters(): a thread that waits for many handles in turn must find the whole batch complete when it wakes.
  // `on_gpu`: shows when the GPU has finished the result; null: no GPU has work to do for it.
  // `received`: source and size of the message of a receive.
  void complete(int64_t handle, Status status, std::vector<hvl_output> outputs, GpuResultPtr on_gpu = nullptr,
                const hvl_received& received = {});
  // The engine: wakes the threads that wait for handles that were completed since the last call.
  void wake_waiters();

  // HVL_OK: complete; HVL_IN_PROGRESS; HVL_UNKNOWN_HANDLE.
  hvl_status poll(int64_t handle);
  // Sleeps until completion, a signal or the deadline (now_ns() time). HVL_OK, HVL_IN_PROGRESS, HVL_UNKNOWN_HANDLE.
  hvl_status wait(int64_t handle, uint64_t deadline);
  // The handles must be complete or unknown. Waits on the host until the GPU has finished or failed, or the job is
  // broken: HVL_OK. HVL_IN_PROGRESS: the deadline (now_ns() time) or a signal came first. If the GPU has failed, an
  // engine (`has_engine`) first has some time to report that.
  hvl_status wait_for_results(const int64_t* handles, size_t count, uint64_t deadline, bool has_engine = true);
  // As wait_for_results(), but makes a stream wait instead of the host. HVL_INVALID_ARGUMENT: the stream is being
  // captured. After any other error but HVL_IN_PROGRESS the host has waited, so the memory is no longer in use.
  Status hold_up_for_results(const int64_t* handles, size_t count, CudaStream stream, uint64_t deadline,
                             bool has_engine = true);
  // The result of a complete handle. This consumes the handle: from then on it is unknown.
  Status consume(int64_t handle, std::vector<hvl_output>* outputs, hvl_received* received = nullptr);
  // Consumes many handles and frees their outputs; sets each handle to 0, and skips those that are 0. Returns the first
  // error, in the order of the handles.
  Status consume_all(int64_t* handles, size_t count);
  // Consumes a complete handle of create_with_copy(): sets *status, and if that is ok, writes the copy to `result`.
  // Returns HVL_OK; HVL_IN_PROGRESS; HVL_UNKNOWN_HANDLE.
  hvl_status take_copy(int64_t handle, char* result, Status* status);
  // Called before and after fork(), so that no other thread uses the table meanwhile.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  // Discards a handle whose request was not accepted.
  void discard(int64_t handle);

 private:
  enum State : uint32_t { kPending, kPendingWithWaiter, kComplete };

  struct Slot {
    std::atomic<uint32_t> state{kComplete};
    uint32_t generation = 0;  // with the slot's index this makes the handle
    bool used = false;
    Status status;
    std::vector<hvl_output> outputs;
    GpuResultPtr on_gpu;
    hvl_received received{};  // a receive's message
    size_t copied_bytes = 0;
    std::vector<char> copy;  // at least copied_bytes long; kept for the slot's next handle
  };

  int64_t take_slot(Slot** slot);  // mutex_ is held
  Slot* find(int64_t handle);      // null if unknown; mutex_ is held
  void release(int64_t handle, Slot* slot);
  bool has_results_on_gpu() const { return num_on_gpu_.load() > 0; }
  GpuResultPtr result_on_gpu(int64_t handle);  // null if it has none

  std::mutex mutex_;        // a leaf lock: no other lock is taken while it is held
  std::deque<Slot> slots_;  // a deque: slots keep their address
  std::vector<uint32_t> free_;
  std::atomic<int64_t> num_on_gpu_{0};
  std::vector<Slot*> to_wake_;  // used by the engine only
};

}  // namespace hvl
