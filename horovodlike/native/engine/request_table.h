// The requests of this rank that the engine has taken from the queue, until they complete: by the id that the log has
// for them, or by name where they are announced in full. For the holder of the engine lock.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/engine_context.h"

namespace hvl {

// The definition of an id of the log.
struct Definition {
  Signature signature;
  std::vector<int64_t> varying;  // laid out as in Record
  size_t varying_per_rank = 0;
  std::shared_ptr<NamedTensor> tensor;  // null: this rank has never asked for it

  const int64_t* varying_of(int rank) const { return varying.data() + static_cast<size_t>(rank) * varying_per_rank; }
};

class RequestTable {
 public:
  explicit RequestTable(EngineContext* context) : context_(*context) {}

  size_t num_in_flight() const { return num_in_flight_; }
  // The request has been taken from the queue; returns its tensor, which is neither announced by id nor in full.
  NamedTensor* add(std::unique_ptr<PendingRequest> request);
  // The tensor's request is found by its name from now on.
  void list_in_full(const NamedTensor& tensor);
  // Whether the tensor's id stands for its request, so that the request may be announced by the id.
  bool is_agreed(NamedTensor* tensor) const;

  void define(const Record& record);
  // The id stands for nothing any more. Returns the tensor if its request is announced by the id: from now on it counts
  // as announced in full. Else null.
  std::shared_ptr<NamedTensor> forget(TensorId id);
  // Null: the log has not defined it.
  const Definition* find(TensorId id) const;
  // The tensors of these ids, each of which must have a request in flight.
  Status find_tensors(const std::vector<TensorId>& ids, std::vector<NamedTensor*>* tensors);
  // Null: no request is known under this name.
  std::shared_ptr<NamedTensor> take_by_name(const Signature& signature);

  // The tensor's request completes.
  void complete(NamedTensor* tensor, Status status, std::vector<hvl_output> outputs = {},
                GpuResultPtr on_gpu = nullptr);
  // All requests complete with this error.
  void fail_all(const Status& status);

  // The oldest first.
  std::vector<const PendingRequest*> in_flight() const;
  // Whether fits(request, is_in_full) holds for any request in flight; `is_in_full`: the log has no id for it.
  template <typename Fits>
  bool has(Fits&& fits) const {
    const auto is_found = [&](const NamedTensor* tensor, bool is_in_full) {
      return tensor != nullptr && tensor->request != nullptr && fits(*tensor->request, is_in_full);
    };
    for (const auto& [id, definition] : definitions_) {
      if (is_found(definition.tensor.get(), false)) return true;
    }
    for (const auto& [key, tensor] : in_full_) {
      if (is_found(tensor.get(), true)) return true;
    }
    return false;
  }

 private:
  void adopt(TensorId id, Definition* definition);

  EngineContext& context_;
  std::unordered_map<TensorId, Definition> definitions_;
  std::unordered_map<std::string, std::shared_ptr<NamedTensor>> in_full_;  // announced without an id, by key
  size_t num_in_flight_ = 0;
};

}  // namespace hvl
