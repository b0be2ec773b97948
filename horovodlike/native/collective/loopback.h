// The data plane of a job of one rank: what a collective of one means.
#pragma once

#include "collective/data_plane.h"

namespace hvl {

class LoopbackDataPlane : public DataPlane {
 public:
  void begin(TeamPtr, uint64_t) override {}
  Status allreduce(const Batch& batch, const FinalBytes& final_bytes) override;
  Status broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status allgather(const Gather& gather) override;
  Status reducescatter(const Scatter& scatter) override;
  Status alltoall(const Exchange& exchange) override;
};

}  // namespace hvl
