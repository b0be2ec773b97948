// A reduction over several hosts in two steps: over the members of each host, then over the hosts.
#pragma once

#include <cstddef>

#include "collective/reduce/reduce.h"

namespace hvl {

// The factor by which the first step multiplies and the second step divides. The sum of a host's members may be too
// large for the dtype although the average of all is not. A power of two, so that only numbers next to zero are
// rounded.
inline double shrinking(const Reduction& reduction, size_t most_members) {
  double factor = 1.0;
  if (!has_small_range(reduction.dtype) || reduction.divisor == 1) return factor;
  while (factor * static_cast<double>(most_members) > 1.0) factor /= 2;
  return factor;
}

// The first step. `most_members`: of any host.
inline Reduction within_host(Reduction reduction, size_t most_members) {
  reduction.prescale *= shrinking(reduction, most_members);
  if (reduction.op == HVL_AVERAGE) reduction.op = HVL_SUM;
  reduction.postscale = 1.0;
  reduction.divisor = 1;
  return reduction;
}

// The second step, after the first.
inline Reduction between_hosts(Reduction reduction, size_t most_members) {
  reduction.prescale = 1.0 / shrinking(reduction, most_members);
  return reduction;
}

// True if the intermediate result may not fit into the dtype: integers that are divided or scaled.
inline bool is_in_one_step(const Reduction& reduction) {
  return !is_floating(reduction.dtype) &&
         (reduction.divisor != 1 || reduction.prescale != 1.0 || reduction.postscale != 1.0);
}

}  // namespace hvl
