// Collectives on tensors of a GPU by the data plane of the CPU: copied to the host, done there, and copied back.
//
// Two halves of the host's memory are used in turn: while the ranks are busy with one the device copies the other.
// Where the memory of a half is read and written is in the order of the stream, so nobody waits for a copy back.
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

// For who holds the engine lock.
class Staging {
 public:
  // `who`: this rank and its GPU. `bytes`: of a half, the same on all ranks. Copies go through `stream`.
  Staging(std::string who, std::shared_ptr<Gpu> gpu, CudaStream stream, uint64_t bytes, DataPlane* cpu, Waiter* waiter)
      : who_(std::move(who)), gpu_(std::move(gpu)), stream_(stream), bytes_(bytes), cpu_(cpu), waiter_(waiter) {}

  // Each of these says what go_on() is to do; the arguments live until it is done. Places are those in the team.
  Status allreduce(const Batch& batch);
  Status broadcast(const Batch& batch, int root, bool is_root);
  Status allgather(const Gather& gather, size_t mine);
  Status reducescatter(const Scatter& scatter, size_t mine);
  Status alltoall(const Exchange& exchange);
  // All of a batch at once, for `work` to do in place. `host`: the same batch, where it is on the host.
  Status whole(const Batch& batch, Batch* host, std::function<Status(DataPlane*)> work);

  // HVL_IN_PROGRESS: interrupted; the next call goes on. Done: the stream has been given all there is to it.
  Status go_on();
  // After whole(), when what copies from the memory keeps it: lets go of so much as only that needs.
  void let_go_of_whole();
  // What the stream copies from and to.
  const std::shared_ptr<PinnedMemory>& memory() const { return memory_; }

 private:
  struct Copy {
    const char* from;
    char* to;
    uint64_t num_bytes;
  };
  // What goes through one half: its begin and end for the device, and what the ranks do in between.
  struct Step {
    std::vector<Copy> in;   // to the host
    std::vector<Copy> out;  // to the device
    std::function<Status(DataPlane*)> work;
  };

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
