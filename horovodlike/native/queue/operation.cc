#include "queue/operation.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "collective/reduce/reduce.h"

namespace hvl {
namespace {

Status check_tensor(const hvl_request& request, int index) {
  const hvl_tensor& tensor = request.tensors[index];
  std::string where = "tensor " + std::to_string(index) + " of '" + request.name + "'";
  if (tensor.dtype < 0 || tensor.dtype >= kNumDataTypes) {
    return Status(HVL_INVALID_ARGUMENT, where + " has the unknown dtype " + std::to_string(tensor.dtype));
  }
  if (tensor.ndim < 0 || tensor.ndim > kMaxDimensions) {
    return Status(HVL_INVALID_ARGUMENT, where + " has " + std::to_string(tensor.ndim) + " dimensions; at most " +
                                            std::to_string(kMaxDimensions) + " are supported: reshape it first");
  }
  int64_t num_bytes = static_cast<int64_t>(size_of(static_cast<DataType>(tensor.dtype)));
  for (int d = 0; d < tensor.ndim; ++d) {
    if (tensor.shape[d] < 0) return Status(HVL_INVALID_ARGUMENT, where + " has a negative dimension");
    if (__builtin_mul_overflow(num_bytes, tensor.shape[d], &num_bytes)) {
      return Status(HVL_INVALID_ARGUMENT, where + " is too large: its bytes do not fit 64 bits");
    }
  }
  const Kind kind = static_cast<Kind>(request.kind);
  if (needs_rows(kind) && tensor.ndim == 0) {
    return Status(HVL_INVALID_ARGUMENT, where + " is a scalar; " + name_of(kind) + " needs at least one dimension");
  }
  if (!is_reduction(kind)) return Status();
  const char* why_not =
      why_not_reducible(static_cast<DataType>(tensor.dtype), static_cast<ReduceOp>(request.reduce_op));
  return why_not == nullptr ? Status() : Status(HVL_INVALID_ARGUMENT, where + ": " + why_not);
}

Status check_splits(const hvl_request& request, const std::string& name) {
  if (request.num_arguments % request.num_tensors != 0) {
    return Status(HVL_INVALID_ARGUMENT, std::to_string(request.num_arguments) + " splits of " + name +
                                            " are not as many for each of " + std::to_string(request.num_tensors) +
                                            " tensors");
  }
  const int32_t members = request.num_arguments / request.num_tensors;
  for (int t = 0; t < request.num_tensors; ++t) {
    const std::string where = (request.num_tensors > 1 ? "tensor " + std::to_string(t) + " of " : "") + name;
    int64_t left = request.tensors[t].shape[0];
    for (int32_t member = 0; member < members; ++member) {
      const int64_t split = request.arguments[t * members + member];
      if (split < 0 || split > INT32_MAX) {
        return Status(HVL_INVALID_ARGUMENT,
                      "the splits of " + where + " must not be negative, nor larger than 2^31 - 1");
      }
      if (split > left) {
        return Status(HVL_INVALID_ARGUMENT, "the splits of " + where + " are more than its " +
                                                std::to_string(request.tensors[t].shape[0]) + " rows");
      }
      left -= split;
    }
  }
  return Status();
}

Status check_formats(const hvl_request& request, const std::string& name) {
  if (request.num_arguments != 0 && request.num_arguments != request.num_tensors) {
    return Status(HVL_INVALID_ARGUMENT, std::to_string(request.num_arguments) + " memory formats of " + name +
                                            " are not one for each of " + std::to_string(request.num_tensors) +
                                            " tensors");
  }
  for (int t = 0; t < request.num_arguments; ++t) {
    if (!is_memory_format(request.arguments[t], static_cast<size_t>(request.tensors[t].ndim))) {
      return Status(HVL_INVALID_ARGUMENT, (request.num_tensors > 1 ? "tensor " + std::to_string(t) + " of " : "") +
                                              name + ": no memory format " + std::to_string(request.arguments[t]) +
                                              " of " + std::to_string(request.tensors[t].ndim) + " dimensions");
    }
  }
  return Status();
}

Status check_arguments(const hvl_request& request, Kind kind, const std::string& name) {
  if (changes_process_sets(kind) && request.process_set != 0) {
    return Status(HVL_INVALID_ARGUMENT, name + " concerns all ranks, and is for process set 0 only");
  }
  const int64_t* begin = request.arguments;
  const int64_t* end = begin + request.num_arguments;
  if (kind == HVL_ALLREDUCE) {
    return check_formats(request, name);
  } else if (kind == HVL_ALLTOALL) {
    return check_splits(request, name);
  } else if (kind == HVL_ADD_PROCESS_SET) {
    if (begin == end || *begin < 0 || std::adjacent_find(begin, end, std::greater_equal<int64_t>()) != end) {
      return Status(HVL_INVALID_ARGUMENT, "a process set needs ranks that are different and ascending");
    }
  } else if (request.num_arguments != (kind == HVL_REMOVE_PROCESS_SET ? 1 : 0)) {
    return Status(HVL_INVALID_ARGUMENT,
                  std::to_string(request.num_arguments) + " arguments for " + name_of(kind) + " " + name);
  }
  return Status();
}

Status check_request(const hvl_request& request) {
  if (request.name == nullptr || request.name[0] == '\0' || strlen(request.name) > kMaxNameBytes) {
    return Status(HVL_INVALID_ARGUMENT, "a request's name has 1 to " + std::to_string(kMaxNameBytes) + " bytes");
  }
  std::string name = std::string("'") + request.name + "'";
  if (request.kind < 0 || request.kind >= kNumKinds) {
    return Status(HVL_INVALID_ARGUMENT, "unknown operation " + std::to_string(request.kind) + " for " + name);
  }
  if (request.reduce_op < 0 || request.reduce_op >= kNumReduceOps ||
      (request.reduce_op == HVL_ADASUM && request.kind != HVL_ALLREDUCE)) {
    return Status(HVL_INVALID_ARGUMENT,
                  "reduction operation " + std::to_string(request.reduce_op) + " for " + name +
                      " is not one of Average, Sum, Min, Max, Product, and of an allreduce Adasum");
  }
  if (request.process_set < 0) {
    return Status(HVL_INVALID_ARGUMENT,
                  name + " is for process set " + std::to_string(request.process_set) + ", which cannot exist");
  }
  if (request.device != HVL_CPU && request.device != HVL_CUDA) {
    return Status(HVL_INVALID_ARGUMENT,
                  name + " is on a device that the engine cannot reach: copy it to the CPU or to an NVIDIA GPU");
  }
  const Kind kind = static_cast<Kind>(request.kind);
  const bool given = request.num_tensors > 0 && request.tensors != nullptr;
  if (given != has_tensors(kind) || static_cast<size_t>(request.num_tensors) > kMaxGroup) {
    return Status(HVL_INVALID_ARGUMENT, std::to_string(request.num_tensors) + " tensors for " +
                                            name_of(static_cast<Kind>(request.kind)) + " " + name);
  }
  Status status;
  for (int t = 0; status.ok() && t < request.num_tensors; ++t) status = check_tensor(request, t);
  return status.ok() ? check_arguments(request, kind, name) : status;
}

std::shared_ptr<Operation> copy(const hvl_request& request) {
  auto operation = std::make_shared<Operation>();
  Signature& signature = operation->signature;
  signature.name = request.name;
  signature.kind = static_cast<Kind>(request.kind);
  // A field without meaning for the kind is left at its default, so that the ranks do not differ in it.
  const bool reduces = is_reduction(signature.kind);
  if (reduces) signature.op = static_cast<ReduceOp>(request.reduce_op);
  if (has_tensors(signature.kind)) signature.device = static_cast<Device>(request.device);
  if (has_root(signature.kind) || signature.kind == HVL_ADD_PROCESS_SET) signature.root = request.root_rank;
  signature.process_set = request.process_set;
  operation->sequence = request.sequence;
  if (reduces) signature.prescale = request.prescale;
  if (reduces) signature.postscale = request.postscale;
  const int64_t* end = request.arguments + request.num_arguments;
  const auto is_default = [](int64_t format) { return format == HVL_ROW_MAJOR; };
  if (signature.kind != HVL_ALLREDUCE || !std::all_of(request.arguments, end, is_default)) {
    signature.arguments.assign(request.arguments, end);
  }
  for (int t = 0; t < request.num_tensors; ++t) {
    const hvl_tensor& tensor = request.tensors[t];
    TensorSignature described;
    described.dtype = static_cast<DataType>(tensor.dtype);
    described.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
    operation->num_bytes.push_back(described.num_bytes());
    operation->total_bytes += described.num_bytes();
    signature.tensors.push_back(std::move(described));
  }
  return operation;
}

}  // namespace

Status make_operation(const hvl_request& request, std::shared_ptr<Operation>* operation) {
  Status status = check_request(request);
  if (status.ok()) *operation = copy(request);
  return status;
}

}  // namespace hvl
