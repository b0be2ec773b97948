// A reduction over several hosts in two steps: what the members of each host have, then what the hosts have.
#pragma once

#include "collective/reduce.h"

namespace hvl {

// The first step.
inline Reduction within_host(Reduction reduction) {
  if (reduction.op == HVL_AVERAGE) reduction.op = HVL_SUM;
  reduction.postscale = 1.0;
  reduction.divisor = 1;
  return reduction;
}

// The second step, after the first.
inline Reduction between_hosts(Reduction reduction) {
  reduction.prescale = 1.0;
  return reduction;
}

// What is in between may not fit into the dtype: integers that are divided or scaled.
inline bool is_in_one_step(const Reduction& reduction) {
  return !is_floating(reduction.dtype) &&
         (reduction.divisor != 1 || reduction.prescale != 1.0 || reduction.postscale != 1.0);
}

}  // namespace hvl
