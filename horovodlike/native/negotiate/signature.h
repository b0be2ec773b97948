// The properties of one operation on which all ranks must agree.
#pragma once

#include <string>
#include <vector>

#include "base/types.h"

namespace hvl {

struct TensorSignature {
  DataType dtype = HVL_FLOAT32;
  Shape shape;

  int64_t num_bytes() const { return num_elements(shape) * static_cast<int64_t>(size_of(dtype)); }
  bool operator==(const TensorSignature& other) const { return dtype == other.dtype && shape == other.shape; }
};

struct Signature {
  std::string name;
  Kind kind = HVL_ALLREDUCE;
  ReduceOp op = HVL_SUM;
  Device device = HVL_CPU;
  int32_t root = -1;
  int32_t process_set = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<TensorSignature> tensors;  // more than one: a group, executed as a whole or not at all
  std::vector<int64_t> arguments;        // see hvl_request

  bool operator==(const Signature& other) const;
  bool operator!=(const Signature& other) const { return !(*this == other); }
  int64_t num_bytes() const;
  // True for the addition of a process set that its members request, and no other rank.
  bool is_by_members() const { return kind == HVL_ADD_PROCESS_SET && root >= 0; }
  MemoryFormat memory_format(size_t tensor) const;  // allreduce only
};

// The varying values are the part of a signature that may differ between the ranks. Allgather, gather: the extent of
// dimension 0 of each tensor. Alltoall: the same, and then for each tensor the number of rows for each member of the
// process set. take_varying() takes these values out of the signature, put_varying() puts them in.
std::vector<int64_t> take_varying(Signature* signature);
void put_varying(const int64_t* varying, size_t count, Signature* signature);

}  // namespace hvl
