// The data plane: moves and reduces the bytes of batches that all ranks of a team run in the same order.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/status.h"
#include "fuse/batch.h"

namespace hvl {

// Told now and then how many bytes of the stream are final in the outputs, so that tensors complete before the batch.
using FinalBytes = std::function<void(uint64_t num_bytes)>;

// One rank's view of one allgather.
struct Gather {
  const char* input;                  // this rank's block
  char* output;                       // all blocks, one after the other
  std::vector<uint64_t> block_bytes;  // by rank
};

// One rank's view of one reducescatter.
struct Scatter {
  const char* input;                  // the ranks' blocks, one after the other
  char* output;                       // this rank's block, reduced
  std::vector<uint64_t> block_bytes;  // by rank; whole elements
  Reduction reduction;
};

// All functions are called by the engine, one at a time, and return when this rank's part is done. HVL_IN_PROGRESS: the
// thread was interrupted while it waited for other ranks; the next call, with the same arguments, goes on from there.
// Any other error means that the job is broken; the outputs are then undefined.
class DataPlane {
 public:
  virtual ~DataPlane() = default;

  virtual Status allreduce(const Batch& batch, const FinalBytes& final_bytes) = 0;
  virtual Status broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) = 0;
  virtual Status allgather(const Gather& gather) = 0;
  virtual Status reducescatter(const Scatter& scatter) = 0;
};

}  // namespace hvl
