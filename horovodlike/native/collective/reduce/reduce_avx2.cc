// reduce() for x86 processors with AVX2 and F16C.
#include "base/target.h"

HVL_TARGET_AVX2

#include "collective/reduce/reduce_kernels.h"

namespace hvl {
namespace {

struct Avx2 {
  [[maybe_unused]] static constexpr size_t kVectorBytes = 32;
};

}  // namespace

void reduce_avx2(const Reduction& reduction, const Arrays& arrays) { reduce_if_built<Avx2>(reduction, arrays); }

}  // namespace hvl
