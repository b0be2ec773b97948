// The engine's own names for the enumerations of hvl.h, and the properties of their values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <type_traits>
#include <vector>

#include "hvl.h"

namespace hvl {

using Kind = hvl_kind;
using ReduceOp = hvl_reduce_op;
using DataType = hvl_dtype;
using Device = hvl_device;
using MemoryFormat = hvl_memory_format;
using Shape = std::vector<int64_t>;

// The next multiple of a unit.
constexpr uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

// A floating-point number of less than 32 bits, as its bits: sign, exponent, fraction. base/minifloat.h converts it.
template <class Unsigned, int kExponent, int kFraction, bool kInfinity = true>
struct Minifloat {
  using Bits = Unsigned;
  static constexpr int kExponentBits = kExponent;
  static constexpr int kFractionBits = kFraction;
  // If not, only the pattern of all bits set is NaN, and a number out of range becomes the largest number.
  static constexpr bool kHasInfinity = kInfinity;
  Bits bits;
};

using Float16 = Minifloat<uint16_t, 5, 10>;
using Bfloat16 = Minifloat<uint16_t, 8, 7>;
using Float8E4m3fn = Minifloat<uint8_t, 4, 3, false>;
using Float8E5m2 = Minifloat<uint8_t, 5, 2>;

// All data types in the order of their numbers: the constant of hvl.h, the name, and the type of an element. Sizes, the
// numbers that a decoder accepts, and the reduction of elements are derived from this list. A bool is a byte, and any
// value but 0 is true.
#define HVL_DATA_TYPES(X)                             \
  X(HVL_UINT8, "uint8", uint8_t)                      \
  X(HVL_INT8, "int8", int8_t)                         \
  X(HVL_UINT16, "uint16", uint16_t)                   \
  X(HVL_INT16, "int16", int16_t)                      \
  X(HVL_INT32, "int32", int32_t)                      \
  X(HVL_INT64, "int64", int64_t)                      \
  X(HVL_FLOAT16, "float16", Float16)                  \
  X(HVL_FLOAT32, "float32", float)                    \
  X(HVL_FLOAT64, "float64", double)                   \
  X(HVL_BOOL, "bool", bool)                           \
  X(HVL_BFLOAT16, "bfloat16", Bfloat16)               \
  X(HVL_FLOAT8_E4M3FN, "float8_e4m3fn", Float8E4m3fn) \
  X(HVL_FLOAT8_E5M2, "float8_e5m2", Float8E5m2)

#define HVL_NUMBER(number, name, T) number,
#define HVL_NAME(number, name, T) name,
constexpr DataType kDataTypes[] = {HVL_DATA_TYPES(HVL_NUMBER)};
constexpr const char* kDataTypeNames[] = {HVL_DATA_TYPES(HVL_NAME)};
constexpr int kNumDataTypes = std::size(kDataTypes);

template <class T>
constexpr bool kIsMinifloat = std::is_class_v<T>;
template <class T>
constexpr bool kIsFloating = kIsMinifloat<T> || std::is_floating_point_v<T>;

// Returns function(zero), for a zero of the type that elements of this data type have.
template <class Function>
constexpr auto with_type(DataType dtype, Function&& function) {
  switch (dtype) {
#define HVL_CASE(number, name, T)                                                    \
  static_assert(kDataTypes[number] == number, "data types in the order of numbers"); \
  case number: return function(T());
    HVL_DATA_TYPES(HVL_CASE)
  }
  __builtin_unreachable();
}

constexpr size_t size_of(DataType dtype) {
  return with_type(dtype, [](auto zero) { return sizeof zero; });
}

constexpr bool is_floating(DataType dtype) {
  return with_type(dtype, [](auto zero) { return kIsFloating<decltype(zero)>; });
}

// True if the exponent has fewer bits than float32's, so that the sum of a few numbers may be out of range.
constexpr bool has_small_range(DataType dtype) {
  return with_type(dtype, [](auto zero) {
    using T = decltype(zero);
    if constexpr (kIsMinifloat<T>) return T::kExponentBits < 8;
    return false;
  });
}

constexpr const char* name_of(DataType dtype) { return kDataTypeNames[dtype]; }

constexpr const char* kKindNames[] = {"allreduce",
                                      "allgather",
                                      "broadcast",
                                      "barrier",
                                      "reducescatter",
                                      "alltoall",
                                      "join",
                                      "addition of process set",
                                      "removal of process set",
                                      "gather",
                                      "scatter",
                                      "reduce"};
constexpr int kNumKinds = std::size(kKindNames);

constexpr const char* name_of(Kind kind) { return kKindNames[kind]; }

constexpr bool is_reduction(Kind kind) {
  return kind == HVL_ALLREDUCE || kind == HVL_REDUCESCATTER || kind == HVL_REDUCE;
}

constexpr bool has_root(Kind kind) {
  return kind == HVL_BROADCAST || kind == HVL_GATHER || kind == HVL_SCATTER || kind == HVL_REDUCE;
}

// True if the outputs are allocated only when the sizes on all ranks are known.
constexpr bool allocates(Kind kind) { return kind == HVL_ALLGATHER || kind == HVL_ALLTOALL || kind == HVL_GATHER; }

constexpr bool needs_rows(Kind kind) { return allocates(kind) || kind == HVL_REDUCESCATTER; }

constexpr bool has_tensors(Kind kind) {
  return kind != HVL_BARRIER && kind != HVL_JOIN && kind != HVL_ADD_PROCESS_SET && kind != HVL_REMOVE_PROCESS_SET;
}

constexpr bool changes_process_sets(Kind kind) { return kind == HVL_ADD_PROCESS_SET || kind == HVL_REMOVE_PROCESS_SET; }

constexpr const char* kReduceOpNames[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
constexpr int kNumReduceOps = std::size(kReduceOpNames);

constexpr const char* name_of(ReduceOp op) { return kReduceOpNames[op]; }

constexpr const char* kMemoryFormatNames[] = {"row-major", "channels_last", "column-major"};

constexpr const char* name_of(MemoryFormat format) { return kMemoryFormatNames[format]; }

// True if `format` is a memory format that a tensor of `num_dimensions` dimensions can have.
constexpr bool is_memory_format(int64_t format, size_t num_dimensions) {
  return format == HVL_ROW_MAJOR || (format == HVL_CHANNELS_LAST && num_dimensions >= 3) ||
         (format == HVL_COLUMN_MAJOR && num_dimensions >= 2);
}

constexpr const char* name_of(Device device) { return device == HVL_CPU ? "CPU" : "GPU"; }

inline int64_t num_elements(const Shape& shape) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count;
}

}  // namespace hvl
