// reduce() for each level of vector instructions, for reduce.cc to choose from and for tests to compare.
#pragma once

#include "base/target.h"
#include "collective/reduce/reduce.h"

namespace hvl {

// Only where cpu_level() is at least that of the name, and not for scaled integers.
void reduce_baseline(const Reduction& reduction, const Arrays& arrays);
void reduce_avx2(const Reduction& reduction, const Arrays& arrays);
void reduce_avx512(const Reduction& reduction, const Arrays& arrays);

// reduce() at a level that this processor has.
void reduce_at(CpuLevel level, const Reduction& reduction, const Arrays& arrays);

}  // namespace hvl
