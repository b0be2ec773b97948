// The decisions on which reductions NCCL runs, and between which ranks. They are the same on all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collective/reduce/reduce.h"
#include "cuda/gpu_access.h"
#include "nccl/nccl_api.h"

namespace hvl {

// The NCCL form of a reduction, or the reason why NCCL does not run it.
struct NcclReduction {
  const char* why_not = nullptr;  // null: NCCL runs it
  NcclDataType dtype = kNcclUint8;
  NcclRedOp op = kNcclSum;
  double factor = 1.0;  // other than 1: every source is multiplied by it before it is added
};

// The plan for a reduction by a team of `size` ranks.
//
// NCCL multiplies by the factor in the tensor's dtype, also for an average. So an average of float16 or bfloat16 has
// the rounding error of 1 / size, unless `size` is a power of two. With these dtypes, NCCL is used with any other
// factor only if the factor is exact in them. A team of one rank averages by a sum, which in place needs no work on the
// GPU. NCCL's minimum and maximum do not propagate a NaN: of a NaN and a number they return the number.
NcclReduction plan_reduction(const Reduction& reduction, size_t size);

// The data that the members of a team exchange before they use NCCL together.
struct Introduction {
  NcclUniqueId id;        // the first member's names the communicator, once the members have chosen NCCL
  CudaUuid gpu;           // the member's
  int32_t operations;     // the member's setting, a GpuOperations
  int32_t nccl_version;   // 0: it cannot use NCCL
  char why_no_nccl[200];  // the reason; no 0 at the end if it is full
};

struct TransportChoice {
  bool uses_nccl;
  std::string reason;  // why not, for the log
};

// `ranks`: the members' ranks, in the same order.
TransportChoice choose_transport(const std::vector<Introduction>& members, const std::vector<int>& ranks);

// Returns advice if this member (at place `mine`) is the first of several that share a GPU although one of the GPUs
// that it sees (`visible`) is unused. Else empty.
std::string advise_on_placement(const std::vector<Introduction>& members, const std::vector<int>& ranks, size_t mine,
                                const std::vector<CudaUuid>& visible);

}  // namespace hvl
