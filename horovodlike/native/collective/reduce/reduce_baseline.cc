// reduce() with the vector instructions that every processor of the architecture has.
#include "collective/reduce/reduce_kernels.h"

namespace hvl {
namespace {

struct Baseline {
  static constexpr size_t kVectorBytes = 16;
};

}  // namespace

void reduce_baseline(const Reduction& reduction, const Arrays& arrays) { reduce_vectors<Baseline>(reduction, arrays); }

}  // namespace hvl
