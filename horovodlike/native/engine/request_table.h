// The requests of this rank that the engine has taken from the queue, until they complete. A request is found by the id
// that the log has for its tensor, or by name if it is announced in full. Only the holder of the engine lock uses it.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/engine_context.h"

namespace hvl {

// An id's meaning, as the log defines it.
struct Definition {
  Signature signature;
  std::vector<int64_t> varying;  // laid out as in Record
  size_t varying_per_rank = 0;
  std::shared_ptr<NamedTensor> tensor;  // null: this rank has never requested it

  const int64_t* varying_of(int rank) const { return varying.data() + static_cast<size_t>(rank) * varying_per_rank; }
};

class RequestTable {
 public:
  explicit RequestTable(EngineContext* context) : context_(*context) {}

  size_t num_in_flight() const { return num_in_flight_; }
  // Adds a request from the queue, which is not announced yet, and returns its tensor.
  NamedTensor* add(std::unique_ptr<PendingRequest> request);
  // Makes the tensor's request findable by its name.
  void list_in_full(const NamedTensor& tensor);
  // True if the tensor's request matches the definition of its id, so that it may be announced by the id.
  bool is_agreed(NamedTensor* tensor) const;

  void define(const Record& record);
  // Removes the definition of the id. Returns the tensor if its request is announced by the id: from now on the request
  // counts as announced in full. Returns null otherwise.
  std::shared_ptr<NamedTensor> forget(TensorId id);
  // Returns null if the id is not defined.
  const Definition* find(TensorId id) const;
  // Finds the tensors of these ids. Fails if one of them has no request in flight.
  Status find_tensors(const std::vector<TensorId>& ids, std::vector<NamedTensor*>* tensors);
  // Returns the tensor of this name, which may have no request, or null. Removes it from those announced in full.
  std::shared_ptr<NamedTensor> take_by_name(const Signature& signature);

  // Completes the tensor's request.
  void complete(NamedTensor* tensor, Status status, std::vector<hvl_output> outputs = {},
                GpuResultPtr on_gpu = nullptr);
  // Completes all requests with this error.
  void fail_all(const Status& status);

  // Returns the requests in flight, the oldest first.
  std::vector<const PendingRequest*> in_flight() const;
  // True if fits(request, is_in_full) is true for any request in flight; `is_in_full`: it is announced in full.
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
  std::unordered_map<std::string, std::shared_ptr<NamedTensor>> in_full_;  // announced in full, by key
  size_t num_in_flight_ = 0;
  size_t num_with_function_ = 0;  // the requests in flight with a completion function
  uint64_t counted_until_ = 0;    // the end of their time that is counted as blocked
};

}  // namespace hvl
