// The data plane of the ranks of one host.
#pragma once

#include <memory>
#include <utility>

#include "collective/data_plane.h"
#include "collective/shm/chunk_pipeline.h"

namespace hvl {

class ShmDataPlane : public DataPlane {
 public:
  ShmDataPlane(std::shared_ptr<HostMemory> memory, int local_rank, Waiter* waiter)
      : pipeline_(std::move(memory), local_rank, waiter) {}

  void begin(TeamPtr team, uint64_t number) override { pipeline_.begin(std::move(team), number); }
  Status allreduce(const Batch& batch, const FinalBytes& final_bytes) override;
  Status broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status allgather(const Gather& gather) override;
  Status reducescatter(const Scatter& scatter) override;
  Status alltoall(const Exchange& exchange) override;

 private:
  ChunkPipeline pipeline_;
};

}  // namespace hvl
