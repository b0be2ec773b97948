#include "nccl/nccl_plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/minifloat.h"
#include "negotiate/rank_set.h"

namespace hvl {

namespace {

bool dtype_of(DataType dtype, NcclDataType* nccl) {
  switch (dtype) {
    case HVL_BOOL:
    case HVL_UINT8: *nccl = kNcclUint8; return true;
    case HVL_INT8: *nccl = kNcclInt8; return true;
    case HVL_INT32: *nccl = kNcclInt32; return true;
    case HVL_INT64: *nccl = kNcclInt64; return true;
    case HVL_FLOAT16: *nccl = kNcclFloat16; return true;
    case HVL_BFLOAT16: *nccl = kNcclBfloat16; return true;
    case HVL_FLOAT32: *nccl = kNcclFloat32; return true;
    case HVL_FLOAT64: *nccl = kNcclFloat64; return true;
    default: return false;
  }
}

// Returns NCCL's operation. For bools, which are bytes of 0 or 1, `or` is the maximum and `and` the minimum.
NcclRedOp op_of(ReduceOp op, DataType dtype) {
  switch (op) {
    case HVL_MIN: return kNcclMin;
    case HVL_MAX: return kNcclMax;
    case HVL_PRODUCT: return dtype == HVL_BOOL ? kNcclMin : kNcclProd;
    default: return dtype == HVL_BOOL ? kNcclMax : kNcclSum;
  }
}

bool is_same(const CudaUuid& a, const CudaUuid& b) { return memcmp(&a, &b, sizeof a) == 0; }

// True also for 1 / f * f, which may differ from 1 by a rounding error, as small as a sum's.
bool is_one(double factor) { return std::abs(factor - 1.0) <= 4 * std::numeric_limits<double>::epsilon(); }

bool has_exactly(DataType dtype, double factor) {
  return with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    if constexpr (kIsMinifloat<T>) return widen(narrow<T>(factor)) == factor;
    return true;  // the factor's rounding error is as small as the result's
  });
}

}  // namespace

NcclReduction plan_reduction(const Reduction& reduction, size_t size) {
  NcclReduction plan;
  if (!dtype_of(reduction.dtype, &plan.dtype)) {
    plan.why_not = is_floating(reduction.dtype) ? "NCCL adds up 8-bit floats on few GPUs, and rounds each sum"
                                                : "NCCL has no 16-bit integers";
    return plan;
  }
  plan.op = op_of(reduction.op, reduction.dtype);
  const double product = reduction.prescale * reduction.postscale;
  const double scale = is_one(product) ? 1.0 : product;
  const bool adds = reduction.op == HVL_SUM || reduction.op == HVL_AVERAGE;
  if (!adds) {
    const bool scaled = reduction.prescale != 1.0 || reduction.postscale != 1.0;
    if (scaled) plan.why_not = "NCCL scales sums only";
  } else if (reduction.op == HVL_AVERAGE && scale == 1.0 && is_floating(reduction.dtype) && size > 1 &&
             static_cast<size_t>(reduction.divisor) == size) {
    plan.op = kNcclAvg;
  } else {
    plan.factor = scale / reduction.divisor;
    const bool scaled = reduction.prescale != 1.0 || reduction.postscale != 1.0 || reduction.divisor != 1;
    if (scaled && !is_floating(reduction.dtype)) {
      plan.why_not = "NCCL divides and scales integers with other results";
    } else if (!has_exactly(reduction.dtype, plan.factor)) {
      plan.why_not = "the factor would be rounded to 16 bits";
    }
  }
  return plan;
}

TransportChoice choose_transport(const std::vector<Introduction>& members, const std::vector<int>& ranks) {
  const auto rank = [&](size_t place) { return "rank " + std::to_string(ranks[place]); };
  for (size_t place = 0; place < members.size(); ++place) {
    const Introduction& member = members[place];
    if (member.operations == static_cast<int32_t>(GpuOperations::kStaging)) {
      return {false, rank(place) + " is told not to use NCCL"};
    }
    if (member.nccl_version == 0) {
      return {false, rank(place) + " cannot use NCCL: " +
                         std::string(member.why_no_nccl, strnlen(member.why_no_nccl, sizeof member.why_no_nccl))};
    }
    if (member.nccl_version != members[0].nccl_version) {
      return {false, rank(0) + " has version " + std::to_string(members[0].nccl_version) + " of NCCL and " +
                         rank(place) + " " + std::to_string(member.nccl_version)};
    }
    for (size_t other = 0; other < place; ++other) {
      if (is_same(members[other].gpu, member.gpu)) {
        return {false, rank(other) + " and " + rank(place) + " share a GPU, which NCCL does not allow"};
      }
    }
  }
  return {true, ""};
}

std::string advise_on_placement(const std::vector<Introduction>& members, const std::vector<int>& ranks, size_t mine,
                                const std::vector<CudaUuid>& visible) {
  const auto places_with = [&](const CudaUuid& gpu) {
    std::vector<size_t> places;
    for (size_t place = 0; place < members.size(); ++place) {
      if (is_same(members[place].gpu, gpu)) places.push_back(place);
    }
    return places;
  };
  const std::vector<size_t> sharing = places_with(members[mine].gpu);
  const auto num_unused =
      std::count_if(visible.begin(), visible.end(), [&](const CudaUuid& gpu) { return places_with(gpu).empty(); });
  if (sharing.size() < 2 || sharing[0] != mine || num_unused == 0) return "";
  std::vector<int> who;
  for (size_t place : sharing) who.push_back(ranks[place]);
  return text_of_ranks(who) + " share a GPU, and nobody uses " + std::to_string(num_unused) + " of the " +
         std::to_string(visible.size()) +
         " GPUs of their host: have each rank choose its own, as by "
         "torch.cuda.set_device(hvd.local_rank()), before it makes a tensor, or start the job with "
         "hvdrun --gpus-per-rank 1";
}

}  // namespace hvl
