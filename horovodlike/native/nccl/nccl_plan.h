// What NCCL can do of what the engine is asked for, and between whom: decisions only, which all ranks take alike.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collective/reduce/reduce.h"
#include "cuda/gpu_access.h"
#include "nccl/nccl_api.h"

namespace hvl {

// How NCCL does a reduction, or why it does not.
struct NcclReduction {
  const char* why_not = nullptr;  // null: it does
  NcclDataType dtype = kNcclUint8;
  NcclRedOp op = kNcclSum;
  double factor = 1.0;  // other than 1: every source is multiplied by it before it is added
};

// By a team of `size`. NCCL averages, and multiplies, in the dtype itself: with float16 and bfloat16 and a size that is
// no power of two, the average has the rounding error of the factor. Other factors are used only where the dtype has
// them exactly. Of one rank an average is a sum, which in place is no work for the device. Its minimum and maximum of a
// NaN and a number are the number.
NcclReduction plan_reduction(const Reduction& reduction, size_t size);

// What the members of a team tell each other before they use NCCL together.
struct Introduction {
  NcclUniqueId id;        // of the communicator; the first member's counts, once it is known that NCCL is used
  CudaUuid gpu;           // which it uses
  int32_t operations;     // its setting, a GpuOperations
  int32_t nccl_version;   // 0: none
  char why_no_nccl[200];  // text
};

struct TransportChoice {
  bool uses_nccl;
  std::string reason;  // for the log: why not
};

// `ranks`: those who introduce themselves, in the same order.
TransportChoice choose_transport(const std::vector<Introduction>& members, const std::vector<int>& ranks);

// Where this member, who is at place `mine`, and others share a GPU although one of those that it sees (`visible`) is
// used by nobody: what to do about it, for the first of those who share. Else empty.
std::string advise_on_placement(const std::vector<Introduction>& members, const std::vector<int>& ranks, size_t mine,
                                const std::vector<CudaUuid>& visible);

}  // namespace hvl
