// Collectives on GPU tensors with the CPU's data plane: the data is copied to the host, processed, and copied back.
//
// Two halves of pinned memory are used in turn: while the data plane works on one, the device copies the other. Copies
// to and from a half are in the order of the stream, so the host does not wait for a copy back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/data_plane.h"
#include "cuda/gpu.h"
#include "sync/waiter.h"

namespace hvl {

// Only the thread that holds the engine lock may use it.
class Staging {
 public:
  // `who`: the name of this rank and its GPU. `bytes`: a half's size, equal on all ranks. Copies go through `stream`.
  Staging(std::string who, std::shared_ptr<Gpu> gpu, CudaStream stream, uint64_t bytes, DataPlane* cpu, Waiter* waiter)
      : who_(std::move(who)), gpu_(std::move(gpu)), stream_(stream), bytes_(bytes), cpu_(cpu), waiter_(waiter) {}

  // Each prepares a collective for resume(). The arguments must live until it is done; `root` and `mine` are places.
  Status allreduce(const Batch& batch);
  Status reduce_to(const Batch& batch, int root, bool is_root);
  Status broadcast(const Batch& batch, int root, bool is_root);
  Status allgather(const Gather& gather, size_t mine);
  Status reducescatter(const Scatter& scatter, size_t mine);
  Status alltoall(const Exchange& exchange);
  // Prepares to copy all of a batch at once, for `work` to process in place. Sets *host to the batch in host memory.
  Status whole(const Batch& batch, Batch* host, std::function<Status(DataPlane*)> work);

  // Runs the collective. HVL_IN_PROGRESS: interrupted; the next call continues. HVL_OK: all work is in the stream.
  Status resume();
  // Call it after whole(), when the copies in flight own the memory: releases it if only whole() needs that much.
  void let_go_of_whole();
  // The memory that the stream copies from and to.
  const std::shared_ptr<PinnedMemory>& memory() const { return memory_; }

 private:
  struct Copy {
    const char* from;
    char* to;
    uint64_t num_bytes;
  };
  // The work on one half: the copies of the device before and after, and the work of the ranks between them.
  struct Step {
    std::vector<Copy> in;   // to the host
    std::vector<Copy> out;  // to the device
    std::function<Status(DataPlane*)> work;
  };

  Status in_steps(const Batch& batch, bool copies_in, const std::function<bool(const Segment&)>& copies_out,
                  const std::function<Status(DataPlane*, const Batch&)>& work);
  Status begin(uint64_t bytes_of_half, uint64_t num_halves = 2);
  char* half_of(size_t step) const { return memory_->data() + (step % 2) * (memory_->num_bytes() / 2); }
  Status copy_in(size_t step);
  Status wait_for_copy(size_t step);
  Status copy_out(size_t step);

  const std::string who_;
  const std::shared_ptr<Gpu> gpu_;
  const CudaStream stream_;
  const uint64_t bytes_;
  DataPlane* const cpu_;
  Waiter* const waiter_;
  std::shared_ptr<PinnedMemory> memory_;
  std::vector<Step> steps_;
  size_t num_begun_ = 0;  // steps whose copies to the host have begun
  size_t num_done_ = 0;
  GpuEventPtr copied_[2];  // the end of each half's copies to the host
};

}  // namespace hvl
