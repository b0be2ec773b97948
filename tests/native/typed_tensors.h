// Tensors of every dtype and of many lengths, and operations on all of them, for tests that hold two ways of doing a
// collective against each other.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/minifloat.h"
#include "job_of_threads.h"

namespace hvl {

// Of tensors: none, one, some that share a buffer, as many bytes as the buffer of most dtypes, and many buffers.
inline const std::vector<int64_t> kCounts = {17, 0, 1, 1009, 1024, 20011, 63, 300};

using Bytes = std::vector<char>;

template <typename T>
void put(Bytes* bytes, size_t index, T element) {
  memcpy(bytes->data() + index * sizeof(T), &element, sizeof element);
}

// Numbers that are added up without rounding, negative ones too, and for integers sums that overflow 8 bits. They
// repeat as those of value() do, and all but the first are copied: element by element sanitizers would make that slow.
inline Bytes tensor_of(DataType dtype, int64_t count, int rank) {
  Bytes bytes(static_cast<size_t>(count) * size_of(dtype) + 1);  // + 1: an address
  const size_t num_values = std::min(static_cast<size_t>(count), kPeriod);
  for (size_t i = 0; i < num_values; ++i) {
    const float number = value(rank, i) - 20;
    switch (dtype) {
      case HVL_UINT8: put(&bytes, i, static_cast<uint8_t>(number + 100)); break;
      case HVL_INT8: put(&bytes, i, static_cast<int8_t>(number)); break;
      case HVL_UINT16: put(&bytes, i, static_cast<uint16_t>(number + 30000)); break;
      case HVL_INT16: put(&bytes, i, static_cast<int16_t>(number * 300)); break;
      case HVL_INT32: put(&bytes, i, static_cast<int32_t>(number) * 20000000); break;
      case HVL_INT64: put(&bytes, i, static_cast<int64_t>(number) * 3); break;
      case HVL_BOOL: put(&bytes, i, static_cast<uint8_t>(number < 0 ? 0 : 1)); break;
      default: with_type(dtype, [&](auto zero) { put(&bytes, i, narrow<decltype(zero)>(number / 8)); });
    }
  }
  const size_t num_bytes = static_cast<size_t>(count) * size_of(dtype);
  for (size_t done = num_values * size_of(dtype); done < num_bytes;) {
    const size_t next = std::min(done, num_bytes - done);  // whole periods, but for the last
    memcpy(bytes.data() + done, bytes.data(), next);
    done += next;
  }
  return bytes;
}

inline std::shared_ptr<Operation> operation_of(Kind kind, const std::vector<DataType>& dtypes, ReduceOp op,
                                               int root = -1) {
  auto operation = std::make_shared<Operation>();
  Signature& signature = operation->signature;
  signature.name = "x";
  signature.kind = kind;
  signature.op = op;
  signature.root = root;
  for (DataType dtype : dtypes) {
    for (int64_t count : kCounts) signature.tensors.push_back({dtype, {count}});
  }
  for (const TensorSignature& tensor : signature.tensors) {
    operation->num_bytes.push_back(tensor.num_bytes());
    operation->total_bytes += tensor.num_bytes();
  }
  return operation;
}

// The root of a scatter has a part for each rank.
inline int64_t parts_of(const Signature& signature, int size) { return signature.kind == HVL_SCATTER ? size : 1; }

}  // namespace hvl
