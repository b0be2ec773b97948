#include "collective/loopback.h"

#include <cstring>

namespace hvl {

namespace {

void copy(const char* from, const Block<char>& to) {
  if (to.num_bytes > 0) memcpy(to.data, from, to.num_bytes);
}

}  // namespace

Status LoopbackDataPlane::allreduce(const Batch& batch, const FinalBytes& final_bytes) {
  for (const Segment& segment : batch.segments()) {
    const void* source = segment.input;
    void* dst = segment.output;
    reduce(segment.reduction, Arrays{&source, 1, &dst, 1, segment.num_bytes / size_of(segment.reduction.dtype)});
  }
  final_bytes(batch.num_bytes());
  return Status();
}

Status LoopbackDataPlane::broadcast(const Batch& batch, int, const FinalBytes& final_bytes) {
  for (const Segment& segment : batch.segments()) {
    if (segment.input != segment.output) memcpy(segment.output, segment.input, segment.num_bytes);
  }
  final_bytes(batch.num_bytes());
  return Status();
}

Status LoopbackDataPlane::allgather(const Gather& gather) {
  copy(gather.input, gather.blocks[0]);
  return Status();
}

Status LoopbackDataPlane::reducescatter(const Scatter& scatter) {
  const void* source = scatter.blocks[0].data;
  void* dst = scatter.output;
  reduce(scatter.reduction,
         Arrays{&source, 1, &dst, 1, scatter.blocks[0].num_bytes / size_of(scatter.reduction.dtype)});
  return Status();
}

Status LoopbackDataPlane::alltoall(const Exchange& exchange) {
  copy(exchange.sent[0].data, exchange.received[0]);
  return Status();
}

}  // namespace hvl
