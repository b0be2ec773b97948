// The arithmetic of the double: element by element, with its own idea of each of NCCL's operations.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/minifloat.h"
#include "nccl/nccl_api.h"

namespace fake_gpu {

inline size_t bytes_of(int dtype) {
  switch (dtype) {
    case hvl::kNcclInt8:
    case hvl::kNcclUint8: return 1;
    case hvl::kNcclFloat16:
    case hvl::kNcclBfloat16: return 2;
    case hvl::kNcclInt32:
    case hvl::kNcclFloat32: return 4;
    default: return 8;
  }
}

// Integers wrap around.
template <typename T>
T combine(int op, T a, T b) {
  if (op == hvl::kNcclMax) return std::max(a, b);
  if (op == hvl::kNcclMin) return std::min(a, b);
  if constexpr (std::is_integral_v<T>) {
    T result;
    op == hvl::kNcclProd ? __builtin_mul_overflow(a, b, &result) : __builtin_add_overflow(a, b, &result);
    return result;
  } else {
    return op == hvl::kNcclProd ? a * b : a + b;
  }
}

// `factor`: of a sum that multiplies first.
template <typename Stored, typename T, typename Load, typename Store>
void reduce_as(int op, double factor, const std::vector<const char*>& sources, char* to, size_t count, Load&& load,
               Store&& store) {
  for (size_t i = 0; i < count; ++i) {
    T result{};
    for (size_t s = 0; s < sources.size(); ++s) {
      Stored stored;
      memcpy(&stored, sources[s] + i * sizeof stored, sizeof stored);
      const T value = factor == 1.0 ? load(stored) : static_cast<T>(load(stored) * static_cast<T>(factor));
      result = s == 0 ? value : combine(op, result, value);
    }
    if (op == hvl::kNcclAvg) result = static_cast<T>(result / static_cast<T>(sources.size()));
    const Stored stored = store(result);
    memcpy(to + i * sizeof stored, &stored, sizeof stored);
  }
}

template <typename T>
void reduce_plain(int op, double factor, const std::vector<const char*>& sources, char* to, size_t count) {
  const auto same = [](T value) { return value; };
  reduce_as<T, T>(op, factor, sources, to, count, same, same);
}

inline void reduce(int dtype, int op, double factor, const std::vector<const char*>& sources, char* to, size_t count) {
  switch (dtype) {
    case hvl::kNcclInt8: return reduce_plain<int8_t>(op, factor, sources, to, count);
    case hvl::kNcclUint8: return reduce_plain<uint8_t>(op, factor, sources, to, count);
    case hvl::kNcclInt32: return reduce_plain<int32_t>(op, factor, sources, to, count);
    case hvl::kNcclInt64: return reduce_plain<int64_t>(op, factor, sources, to, count);
    case hvl::kNcclFloat32: return reduce_plain<float>(op, factor, sources, to, count);
    case hvl::kNcclFloat64: return reduce_plain<double>(op, factor, sources, to, count);
    case hvl::kNcclFloat16:
      return reduce_as<hvl::Float16, float>(op, factor, sources, to, count, hvl::widen<hvl::Float16>,
                                            hvl::narrow<hvl::Float16, float>);
    default:
      return reduce_as<hvl::Bfloat16, float>(op, factor, sources, to, count, hvl::widen<hvl::Bfloat16>,
                                             hvl::narrow<hvl::Bfloat16, float>);
  }
}

}  // namespace fake_gpu
