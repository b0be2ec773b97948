// The data plane of a job of one rank.
#pragma once

#include <cstring>

#include "collective/data_plane.h"

namespace hvl {

class LoopbackDataPlane : public DataPlane {
 public:
  void begin(TeamPtr, uint64_t) override {}
  hvl_transport transport() const override { return HVL_BY_ENGINE; }
  Status allreduce(const Batch& batch, const FinalBytes& final_bytes) override {
    for (const Segment& segment : batch.segments()) {
      const void* source = segment.input;
      void* dst = segment.output;
      reduce(segment.reduction, Arrays{&source, 1, &dst, 1, segment.num_bytes / size_of(segment.reduction.dtype)});
    }
    final_bytes(batch.num_bytes());
    return Status();
  }
  Status reduce_to(const Batch& batch, int, const FinalBytes& final_bytes) override {
    return allreduce(batch, final_bytes);
  }
  Status broadcast(const Batch& batch, int, const FinalBytes& final_bytes) override {
    for (const Segment& segment : batch.segments()) {
      if (segment.input != segment.output) memcpy(segment.output, segment.input, segment.num_bytes);
    }
    final_bytes(batch.num_bytes());
    return Status();
  }
  Status allgather(const Gather& gather) override {
    copy(gather.input, gather.blocks[0]);
    return Status();
  }
  Status reducescatter(const Scatter& scatter) override {
    const void* source = scatter.blocks[0].data;
    void* dst = scatter.output;
    reduce(scatter.reduction,
           Arrays{&source, 1, &dst, 1, scatter.blocks[0].num_bytes / size_of(scatter.reduction.dtype)});
    return Status();
  }
  Status alltoall(const Exchange& exchange) override {
    copy(exchange.sent[0].data, exchange.received[0]);
    return Status();
  }

 private:
  static void copy(const char* from, const Block<char>& to) {
    if (to.num_bytes > 0) memcpy(to.data, from, to.num_bytes);
  }
};

}  // namespace hvl
