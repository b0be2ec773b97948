// Element-wise reduction of several arrays: the arithmetic of every reducing collective.
//
// Sources are combined in the order given, element by element, so a result does not depend on how a batch was cut into
// chunks. Minifloats are accumulated in float32 and rounded once; integers are averaged and scaled in int32 for 8 and
// 16 bits, else in int64, so an Average of int8 does not overflow on the way.
#pragma once

#include <cstddef>

#include "base/target.h"
#include "base/types.h"

namespace hvl {

struct Reduction {
  DataType dtype = HVL_FLOAT32;
  ReduceOp op = HVL_SUM;
  double prescale = 1.0;   // applied to every source
  double postscale = 1.0;  // applied to the result
  int divisor = 1;         // Average: the number of ranks; integers are divided exactly and truncated toward zero
};

// The arrays of one reduction. For every d and i:
//   dsts[d][i] = postscale * (op over s of prescale * sources[s][i]) / divisor
// Each of `dsts` may be one of the sources; there is no other overlap. There is at least one source and one `dst`.
struct Arrays {
  const void* const* sources;
  int num_sources;
  void* const* dsts;
  int num_dsts;
  size_t count;
};

// Adasum is not element-wise and not accepted.
void reduce(const Reduction& reduction, const Arrays& arrays);

// Reduces into one array, element by element without vector instructions. Tests use it as the reference for reduce().
void reduce_scalar(const Reduction& reduction, const void* const* sources, int num_sources, void* dst, size_t count);

// Null if the operation is defined for the dtype, else the reason why not (for the message of an invalid argument).
const char* why_not_reducible(DataType dtype, ReduceOp op);

// reduce() for each level of vector instructions: reduce.cc chooses among them, and tests compare them. Call one only
// if cpu_level() is at least its level, and not for scaled integers.
void reduce_baseline(const Reduction& reduction, const Arrays& arrays);
void reduce_avx2(const Reduction& reduction, const Arrays& arrays);
void reduce_avx512(const Reduction& reduction, const Arrays& arrays);

// reduce() at a level that this processor has.
void reduce_at(CpuLevel level, const Reduction& reduction, const Arrays& arrays);

}  // namespace hvl
