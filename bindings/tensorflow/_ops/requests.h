// Requests of the engine, made from tensors of TensorFlow and kept for further calls.
#pragma once

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "hvl.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace horovodlike_tensorflow {

constexpr int kMaxDimensions = 8;  // of a tensor in the engine
constexpr size_t kRequestsKept = 64;
constexpr size_t kOperationsKept = 1024;

// An address for a tensor without elements, for which TensorFlow has no memory.
inline char* somewhere() {
  static char byte = 0;
  return &byte;
}

inline uintptr_t address_of(const tensorflow::Tensor& tensor) {
  void* data = tensor.data();
  return reinterpret_cast<uintptr_t>(data != nullptr ? data : somewhere());
}

inline int32_t dtype_of(tensorflow::DataType type) {
  switch (type) {
    case tensorflow::DT_UINT8: return HVL_UINT8;
    case tensorflow::DT_INT8: return HVL_INT8;
    case tensorflow::DT_UINT16: return HVL_UINT16;
    case tensorflow::DT_INT16: return HVL_INT16;
    case tensorflow::DT_INT32: return HVL_INT32;
    case tensorflow::DT_INT64: return HVL_INT64;
    case tensorflow::DT_HALF: return HVL_FLOAT16;
    case tensorflow::DT_FLOAT: return HVL_FLOAT32;
    case tensorflow::DT_DOUBLE: return HVL_FLOAT64;
    case tensorflow::DT_BOOL: return HVL_BOOL;
    case tensorflow::DT_BFLOAT16: return HVL_BFLOAT16;
    case tensorflow::DT_FLOAT8_E4M3FN: return HVL_FLOAT8_E4M3FN;
    case tensorflow::DT_FLOAT8_E5M2: return HVL_FLOAT8_E5M2;
    default: return -1;  // the engine refuses it
  }
}

// A call that is wrong on this rank is an invalid argument; a disagreement of the ranks is a failed precondition.
inline absl::Status to_status(int32_t status, const char* message) {
  switch (status) {
    case HVL_OK: return absl::Status();
    case HVL_INVALID_ARGUMENT: return absl::InvalidArgumentError(message);
    case HVL_MISMATCH:
    case HVL_NOT_INITIALIZED: return absl::FailedPreconditionError(message);
    case HVL_RESOURCES: return absl::ResourceExhaustedError(message);
    default: return absl::UnknownError(message);
  }
}

// The arguments of an operation, apart from its tensors.
struct Description {
  int32_t kind = HVL_ALLREDUCE;
  int32_t device = HVL_CPU;  // of the tensors
  std::string name;
  int32_t reduce_op = HVL_SUM;
  int32_t root_rank = -1;
  int32_t process_set = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  bool numbered = false;  // the name gets a number
};

// Reads the text that `calls.Description.encode()` writes: the factors as integers of the same bits, and the name last.
// Returns false if `encoded` is not such a text.
inline bool decode(const std::string& encoded, Description* description) {
  int numbered = 0, begin_of_name = 0;
  int64_t prescale = 0, postscale = 0;
  const int found = sscanf(encoded.c_str(), "%" SCNd32 " %d %" SCNd32 " %" SCNd32 " %" SCNd64 " %" SCNd64 " %n",
                           &description->process_set, &numbered, &description->reduce_op, &description->root_rank,
                           &prescale, &postscale, &begin_of_name);
  if (found != 6 || begin_of_name == 0) return false;
  description->numbered = numbered != 0;
  std::memcpy(&description->prescale, &prescale, sizeof prescale);
  std::memcpy(&description->postscale, &postscale, sizeof postscale);
  description->name = encoded.substr(static_cast<size_t>(begin_of_name));
  return true;
}

using Prepared = std::shared_ptr<hvl_prepared>;
using Tensors = std::vector<tensorflow::Tensor>;

// Returns null if the engine refuses the request: see hvl_last_error().
inline Prepared prepare(const Description& description, const Tensors& tensors, const std::vector<int64_t>& arguments) {
  std::vector<std::vector<int64_t>> shapes;
  std::vector<hvl_tensor> described;
  for (const tensorflow::Tensor& tensor : tensors) {
    const auto extents = tensor.shape().dim_sizes();
    std::vector<int64_t> shape(extents.begin(), extents.end());
    while (shape.size() > kMaxDimensions) {  // the last dimensions become one
      const int64_t last = shape.back();
      shape.pop_back();
      shape.back() *= last;
    }
    shapes.push_back(std::move(shape));
  }
  for (size_t t = 0; t < tensors.size(); ++t) {
    described.push_back({shapes[t].data(), static_cast<int32_t>(shapes[t].size()), dtype_of(tensors[t].dtype())});
  }
  hvl_request request{};
  request.name = description.name.c_str();
  request.tensors = described.empty() ? nullptr : described.data();
  request.num_tensors = static_cast<int32_t>(described.size());
  request.kind = description.kind;
  request.reduce_op = description.reduce_op;
  request.root_rank = description.root_rank;
  request.process_set = description.process_set;
  request.device = description.device;
  request.prescale = description.prescale;
  request.postscale = description.postscale;
  request.arguments = arguments.data();
  request.num_arguments = static_cast<int32_t>(arguments.size());
  hvl_prepared* prepared = hvl_prepare(&request);
  return prepared == nullptr ? nullptr : Prepared(prepared, hvl_release);
}

// A cache of the requests of one operation. Any thread.
class Requests {
 public:
  // Returns null if the engine refuses the request: see hvl_last_error().
  Prepared get(const Description& description, int number, const Tensors& tensors,
               const std::vector<int64_t>& arguments) {
    std::vector<int64_t> key{number, static_cast<int64_t>(arguments.size())};
    key.insert(key.end(), arguments.begin(), arguments.end());
    for (const tensorflow::Tensor& tensor : tensors) {  // dtypes are the same in all calls
      key.push_back(tensor.dims());
      for (int d = 0; d < tensor.dims(); ++d) key.push_back(tensor.dim_size(d));
    }
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = kept_.find(key);
    if (found != kept_.end()) return found->second;
    Description full = description;
    if (number >= 0) full.name += "." + std::to_string(number);
    Prepared prepared = prepare(full, tensors, arguments);
    if (prepared == nullptr) return nullptr;
    if (kept_.size() >= kRequestsKept) kept_.clear();
    kept_.emplace(std::move(key), prepared);
    return prepared;
  }

 private:
  std::mutex mutex_;  // a leaf: no other lock is taken while it is held
  std::map<std::vector<int64_t>, Prepared> kept_;
};

struct Operation {
  Description description;
  Requests requests;
};

using OperationPtr = std::shared_ptr<Operation>;

// A cache of the operations of one kernel, by their encoded descriptions. Any thread.
class Operations {
 public:
  // Returns null if `encoded` is not a description. `like` has the part that all operations of the kernel share.
  OperationPtr get(std::string_view encoded, const Description& like) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = kept_.find(encoded);
    if (found != kept_.end()) return found->second;
    auto operation = std::make_shared<Operation>();
    operation->description = like;
    if (!decode(std::string(encoded), &operation->description)) return nullptr;
    if (kept_.size() >= kOperationsKept) kept_.clear();
    kept_.emplace(encoded, operation);
    return operation;
  }

 private:
  std::mutex mutex_;  // a leaf: no other lock is taken while it is held
  std::map<std::string, OperationPtr, std::less<>> kept_;
};

// The numbers of unnamed operations in eager mode. Each operation gets the lowest number that is not in flight. An
// operation that is complete on one rank has begun on all, so a number means the same operation on all. Any thread.
class Numbers {
 public:
  static Numbers& shared() {
    static Numbers* numbers = new Numbers;
    return *numbers;
  }

  int take(const Description& description) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::set<int>& taken = taken_[{description.process_set, description.name}];
    int number = 0;
    for (auto next = taken.begin(); next != taken.end() && *next == number; ++next) ++number;
    taken.insert(number);
    return number;
  }

  void give_back(const Description& description, int number) {
    std::lock_guard<std::mutex> lock(mutex_);
    taken_[{description.process_set, description.name}].erase(number);
  }

 private:
  std::mutex mutex_;  // a leaf: no other lock is taken while it is held
  std::map<std::pair<int32_t, std::string>, std::set<int>> taken_;
};

}  // namespace horovodlike_tensorflow
