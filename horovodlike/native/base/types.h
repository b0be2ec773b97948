// The engine's own names for the enumerations of hvl.h, and the properties of their values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
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

constexpr int kNumKinds = HVL_REMOVE_PROCESS_SET + 1;
constexpr int kNumDataTypes = HVL_BFLOAT16 + 1;

constexpr size_t size_of(DataType dtype) {
  constexpr size_t kSizes[kNumDataTypes] = {1, 1, 2, 2, 4, 8, 2, 4, 8, 1, 2};
  return kSizes[dtype];
}

constexpr const char* name_of(DataType dtype) {
  constexpr const char* kNames[kNumDataTypes] = {"uint8",   "int8",    "uint16",  "int16", "int32",   "int64",
                                                 "float16", "float32", "float64", "bool",  "bfloat16"};
  return kNames[dtype];
}

constexpr bool is_floating(DataType dtype) {
  return dtype == HVL_FLOAT16 || dtype == HVL_BFLOAT16 || dtype == HVL_FLOAT32 || dtype == HVL_FLOAT64;
}

constexpr const char* name_of(Kind kind) {
  constexpr const char* kNames[kNumKinds] = {"allreduce",
                                             "allgather",
                                             "broadcast",
                                             "barrier",
                                             "reducescatter",
                                             "alltoall",
                                             "join",
                                             "addition of process set",
                                             "removal of process set"};
  return kNames[kind];
}

constexpr bool is_reduction(Kind kind) { return kind == HVL_ALLREDUCE || kind == HVL_REDUCESCATTER; }

constexpr bool needs_rows(Kind kind) {
  return kind == HVL_ALLGATHER || kind == HVL_REDUCESCATTER || kind == HVL_ALLTOALL;
}

// True if the sizes of the outputs depend on all ranks.
constexpr bool allocates(Kind kind) { return kind == HVL_ALLGATHER || kind == HVL_ALLTOALL; }

constexpr bool has_tensors(Kind kind) {
  return kind != HVL_BARRIER && kind != HVL_JOIN && kind != HVL_ADD_PROCESS_SET && kind != HVL_REMOVE_PROCESS_SET;
}

constexpr bool changes_process_sets(Kind kind) { return kind == HVL_ADD_PROCESS_SET || kind == HVL_REMOVE_PROCESS_SET; }

constexpr const char* name_of(ReduceOp op) {
  constexpr const char* kNames[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
  return kNames[op];
}

constexpr const char* name_of(MemoryFormat format) { return format == HVL_ROW_MAJOR ? "row-major" : "channels_last"; }

// True if `format` is a memory format that a tensor of `num_dimensions` dimensions can have.
constexpr bool is_memory_format(int64_t format, size_t num_dimensions) {
  return format == HVL_ROW_MAJOR || (format == HVL_CHANNELS_LAST && num_dimensions >= 3);
}

constexpr const char* name_of(Device device) { return device == HVL_CPU ? "CPU" : "GPU"; }

inline int64_t num_elements(const Shape& shape) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count;
}

}  // namespace hvl
