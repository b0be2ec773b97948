// reduce() for x86 processors with AVX-512 (F, BW, DQ, VL).
#include "base/target.h"

HVL_TARGET_AVX512

#include "collective/reduce/reduce_kernels.h"

namespace hvl {
namespace {

struct Avx512 {
  [[maybe_unused]] static constexpr size_t kVectorBytes = 64;
};

}  // namespace

void reduce_avx512(const Reduction& reduction, const Arrays& arrays) { reduce_if_built<Avx512>(reduction, arrays); }

}  // namespace hvl
