// A reduction over several hosts in two steps: over the members of each host, then over the hosts.
#pragma once

#include <cstddef>

#include "collective/reduce/reduce.h"

namespace hvl {

// The factor by which the first step multiplies and the second step divides: the sum of one host's members may be out
// of the dtype's range although the average of all members is not. A power of two, so that it rounds only numbers close
// to zero.
inline double shrinking(const Reduction& reduction, size_t most_members) {
  double factor = 1.0;
  if (!has_small_range(reduction.dtype) || reduction.divisor == 1) return factor;
  while (factor * static_cast<double>(most_members) > 1.0) factor /= 2;
  return factor;
}

// The reduction of the first step. `most_members`: the largest number of members on one host.
inline Reduction within_host(Reduction reduction, size_t most_members) {
  reduction.prescale *= shrinking(reduction, most_members);
  if (reduction.op == HVL_AVERAGE) reduction.op = HVL_SUM;
  reduction.postscale = 1.0;
  reduction.divisor = 1;
  return reduction;
}

// The reduction of the second step, over the results of the first.
inline Reduction between_hosts(Reduction reduction, size_t most_members) {
  reduction.prescale = 1.0 / shrinking(reduction, most_members);
  return reduction;
}

// True if one step is needed: for integers that are divided or scaled, the intermediate result may be out of range.
inline bool is_in_one_step(const Reduction& reduction) {
  return !is_floating(reduction.dtype) &&
         (reduction.divisor != 1 || reduction.prescale != 1.0 || reduction.postscale != 1.0);
}

}  // namespace hvl
