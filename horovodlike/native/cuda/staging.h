// Collectives on tensors of a GPU by the data plane of the CPU: copied to the host, done there, and copied back.
//
// Two halves of the host's memory are used in turn: while the ranks are busy with one the device copies the other.
// Reads and writes of a half's memory are in the order of the stream, so the host does not wait for a copy back.
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

// For the thread that holds the engine lock.
class Staging {
 public:
  // `who`: this rank and its GPU. `bytes`: of a half, the same on all ranks. Copies go through `stream`.
  Staging(std::string who, std::shared_ptr<Gpu> gpu, CudaStream stream, uint64_t bytes, DataPlane* cpu, Waiter* waiter)
      : who_(std::move(who)), gpu_(std::move(gpu)), stream_(stream), bytes_(bytes), cpu_(cpu), waiter_(waiter) {}

  // Each of these prepares go_on(); the arguments must live until that is done. Places are those in the team.
  Status allreduce(const Batch& batch);
  Status reduce_to(const Batch& batch, int root, bool is_root);
  Status broadcast(const Batch& batch, int root, bool is_root);
  Status allgather(const Gather& gather, size_t mine);
  Status reducescatter(const Scatter& scatter, size_t mine);
  Status alltoall(const Exchange& exchange);
  // Copies all of a batch at once, for `work` to process in place. `host`: the same batch in host memory.
  Status whole(const Batch& batch, Batch* host, std::function<Status(DataPlane*)> work);

  // HVL_IN_PROGRESS: interrupted; the next call continues. Done: all its work has been given to the stream.
  Status go_on();
  // After whole(), when the copies keep the memory alive: releases the memory if only whole() needs that much.
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
  size_t num_begun_ = 0;  // whose copies to the host have begun
  size_t num_done_ = 0;
  GpuEventPtr copied_[2];  // of each half: the end of its copies to the host
};

}  // namespace hvl
