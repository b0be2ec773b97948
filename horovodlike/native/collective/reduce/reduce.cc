#include "collective/reduce/reduce.h"

#include <cassert>
#include <cstring>

#include "collective/reduce/reduce_kernels.h"

namespace hvl {
namespace {

bool is_integer(DataType dtype) { return !is_floating(dtype) && dtype != HVL_BOOL; }

// The vector instructions that every processor of the architecture has.
struct Baseline {
  static constexpr size_t kVectorBytes = 16;
};

}  // namespace

void reduce_baseline(const Reduction& reduction, const Arrays& arrays) { reduce_vectors<Baseline>(reduction, arrays); }

void reduce_at(CpuLevel level, const Reduction& reduction, const Arrays& arrays) {
  switch (level) {
    case CpuLevel::kAvx512: return reduce_avx512(reduction, arrays);
    case CpuLevel::kAvx2: return reduce_avx2(reduction, arrays);
    case CpuLevel::kBaseline: return reduce_baseline(reduction, arrays);
  }
}

void reduce(const Reduction& reduction, const Arrays& arrays) {
  assert(why_not_reducible(reduction.dtype, reduction.op) == nullptr && arrays.num_sources >= 1);
  static const CpuLevel level = cpu_level();
  // Scaled integers go through double one by one: too rare to be worth kernels of their own.
  const bool scaled = reduction.prescale != 1.0 || reduction.postscale != 1.0;
  if (!scaled || !is_integer(reduction.dtype)) return reduce_at(level, reduction, arrays);
  reduce_scalar(reduction, arrays.sources, arrays.num_sources, arrays.dsts[0], arrays.count);
  for (int d = 1; d < arrays.num_dsts && arrays.count > 0; ++d) {
    memcpy(arrays.dsts[d], arrays.dsts[0], arrays.count * size_of(reduction.dtype));
  }
}

const char* why_not_reducible(DataType dtype, ReduceOp op) {
  if (static_cast<int>(dtype) < 0 || static_cast<int>(dtype) >= kNumDataTypes) return "unknown dtype";
  switch (op) {
    case HVL_AVERAGE: return dtype == HVL_BOOL ? "Average is not defined for bool" : nullptr;
    case HVL_SUM:
    case HVL_MIN:
    case HVL_MAX:
    case HVL_PRODUCT: return nullptr;
    case HVL_ADASUM: return is_floating(dtype) ? nullptr : "Adasum is for floating-point tensors";
  }
  return "unknown reduction op";
}

}  // namespace hvl
