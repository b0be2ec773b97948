#include "transport/loopback/loopback.h"

#include <cstring>

namespace hvl {

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
  if (gather.block_bytes[0] > 0) memcpy(gather.output, gather.input, gather.block_bytes[0]);
  return Status();
}

Status LoopbackDataPlane::reducescatter(const Scatter& scatter) {
  const void* source = scatter.input;
  void* dst = scatter.output;
  reduce(scatter.reduction, Arrays{&source, 1, &dst, 1, scatter.block_bytes[0] / size_of(scatter.reduction.dtype)});
  return Status();
}

}  // namespace hvl
