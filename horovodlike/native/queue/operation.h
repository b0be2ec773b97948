// A named tensor, an operation on it, and one request for that operation.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "cuda/gpu.h"
#include "hvl.h"
#include "negotiate/message.h"

namespace hvl {

struct PendingRequest;
struct Operation;

// A tensor's name in one process set. All operations under this name in this process share it.
struct NamedTensor {
  static constexpr TensorId kNoId = UINT32_MAX;

  explicit NamedTensor(std::string key_text) : key(std::move(key_text)) {}

  const std::string key;
  std::atomic<bool> in_flight{false};
  std::atomic<bool> forgotten{false};  // no longer in the table: look the name up again

  // Guarded by the queue's mutex.
  int64_t handle = 0;  // of the request in flight

  // For the engine only.
  bool announced_in_full = false;           // `request` is announced with its signature, not by the id
  TensorId id = kNoId;                      // as the log defines it
  std::shared_ptr<Operation> agreed;        // the last operation found to match the id's definition
  std::unique_ptr<PendingRequest> request;  // this rank's request in flight
};

// A checked copy of an hvl_request: immutable except for the cached look-up of its name.
struct Operation {
  Signature signature;
  std::vector<int64_t> num_bytes;  // of each tensor
  int64_t total_bytes = 0;
  int32_t sequence = 0;  // 0: none

  // The cached tensor of its name, valid in the engine with the number `engine`; guarded by the queue's mutex.
  std::shared_ptr<NamedTensor> tensor;
  uint64_t engine = 0;
};

// The addresses from which a tensor's elements are read, and to which they are written.
struct Memory {
  const char* input = nullptr;
  char* output = nullptr;  // null: the engine allocates it
};

// One accepted request of this rank, from enqueue to completion.
struct PendingRequest {
  std::shared_ptr<Operation> operation;
  std::shared_ptr<NamedTensor> tensor;
  Memory memory;             // of the first tensor
  std::vector<Memory> more;  // of the others in a group
  int64_t handle = 0;
  uint64_t place = 0;      // in its sequence, from 1
  bool is_copied = false;  // the engine works on a copy of the first tensor
  uint64_t enqueued_at = 0;
  hvl_callbacks callbacks{};              // by default none
  std::shared_ptr<const GpuRequest> gpu;  // null: the tensors are on the CPU

  const Signature& signature() const { return operation->signature; }
  const Memory& memory_of(size_t tensor) const { return tensor == 0 ? memory : more[tensor - 1]; }
};

// Makes all checks that need no job, and copies the name, the shapes and the arguments to which the request points.
Status make_operation(const hvl_request& request, std::shared_ptr<Operation>* operation);

}  // namespace hvl
