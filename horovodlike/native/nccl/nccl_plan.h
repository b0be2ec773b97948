// The decisions on which reductions NCCL runs, and between which ranks; all ranks decide alike.
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
  const char* why_not = nullptr;  // null: it does
  NcclDataType dtype = kNcclUint8;
  NcclRedOp op = kNcclSum;
  double factor = 1.0;  // other than 1: every source is multiplied by it before it is added
};

// For a team of `size`. NCCL averages, and multiplies, in the dtype itself: with float16 and bfloat16 and a size that
// is no power of two, the average has the rounding error of the factor. Other factors are used only if the dtype
// represents them exactly. The average of one rank is a sum, which in place is no work for the device. NCCL's minimum
// and maximum of a NaN and a number are the number.
NcclReduction plan_reduction(const Reduction& reduction, size_t size);

// The data that the members of a team exchange before they use NCCL together.
struct Introduction {
  NcclUniqueId id;        // of the communicator; the first member's is used, once the members have chosen NCCL
  CudaUuid gpu;           // that it uses
  int32_t operations;     // its setting, a GpuOperations
  int32_t nccl_version;   // 0: none
  char why_no_nccl[200];  // text
};

struct TransportChoice {
  bool uses_nccl;
  std::string reason;  // for the log: why not
};

// `ranks`: of the members, in the same order.
TransportChoice choose_transport(const std::vector<Introduction>& members, const std::vector<int>& ranks);

// Returns advice if this member (at place `mine`) is the first of several that share a GPU although one of the GPUs
// that it sees (`visible`) is unused. Else empty.
std::string advise_on_placement(const std::vector<Introduction>& members, const std::vector<int>& ranks, size_t mine,
                                const std::vector<CudaUuid>& visible);

}  // namespace hvl
