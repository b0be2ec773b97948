// Handles: how a request's completion reaches the threads that wait for it.
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
  // The same, for a request on a copy of so many bytes. `*copy` is the handle's for as long as it is known.
  int64_t create_with_copy(size_t num_bytes, char** copy);
  // Takes over `outputs`, to be freed with hvl_free by the consumer of the handle. Threads that wait stay asleep until
  // wake_waiters(): a thread that waits for many handles in turn must find the whole batch complete when it wakes.
  // `on_gpu`: tells when the result is there, where a GPU has yet to finish it.
  // `received`: the message that a receive has got.
  void complete(int64_t handle, Status status, std::vector<hvl_output> outputs, GpuResultPtr on_gpu = nullptr,
                const hvl_received& received = {});
  // The engine: wakes the threads that wait for handles that were completed since the last call.
  void wake_waiters();

  // HVL_OK: complete; HVL_IN_PROGRESS; HVL_UNKNOWN_HANDLE.
  hvl_status poll(int64_t handle);
  // Sleeps until completion, a signal or the deadline (now_ns() time). HVL_OK, HVL_IN_PROGRESS, HVL_UNKNOWN_HANDLE.
  hvl_status wait(int64_t handle, uint64_t deadline);
  // The handles are complete or unknown. Waits on the host until the GPU has done their work, or has failed, or the job
  // is broken: HVL_OK. HVL_IN_PROGRESS: not until the deadline (now_ns() time) or a signal. If it has failed, an engine
  // gets some time to say it first.
  hvl_status wait_for_results(const int64_t* handles, size_t count, uint64_t deadline, bool has_engine = true);
  // The same, but a stream waits for it in place of the host. HVL_INVALID_ARGUMENT: the stream is being captured. If it
  // cannot be made to wait, the host waits, so that the memory is not in use after any other error either.
  Status hold_up_for_results(const int64_t* handles, size_t count, CudaStream stream, uint64_t deadline,
                             bool has_engine = true);
  // The result of a complete handle, which is then unknown.
  Status consume(int64_t handle, std::vector<hvl_output>* outputs, hvl_received* received = nullptr);
  // The same for many, without their outputs; writes 0 over the handles, and skips those of 0. The first error in
  // order.
  Status consume_all(int64_t* handles, size_t count);
  // As consume(), for a handle of create_with_copy(), if it is complete: writes its copy to `result` if it has not
  // failed. HVL_OK; HVL_IN_PROGRESS; HVL_UNKNOWN_HANDLE.
  hvl_status take_copy(int64_t handle, char* result, Status* status);
  // Around fork(): no other thread is in the table then.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }
  // Gives back a handle whose request was not accepted.
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
    hvl_received received{};  // of a receive
    size_t copied_bytes = 0;
    std::vector<char> copy;  // of as many bytes or more: kept for the slot's next user
  };

  int64_t take_slot(Slot** slot);  // mutex_ is held
  Slot* find(int64_t handle);      // null if unknown; mutex_ is held
  void release(int64_t handle, Slot* slot);
  bool has_results_on_gpu() const { return num_on_gpu_.load() > 0; }
  GpuResultPtr result_on_gpu(int64_t handle);  // null if it has none

  std::mutex mutex_;        // a leaf: no other lock is taken while it is held
  std::deque<Slot> slots_;  // a deque: slots keep their address
  std::vector<uint32_t> free_;
  std::atomic<int64_t> num_on_gpu_{0};
  std::vector<Slot*> to_wake_;  // for the engine
};

}  // namespace hvl
