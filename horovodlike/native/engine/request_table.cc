#include "engine/request_table.h"

#include <algorithm>
#include <cstdlib>
#include <tuple>
#include <utility>

namespace hvl {

NamedTensor* RequestTable::add(std::unique_ptr<PendingRequest> request) {
  NamedTensor* tensor = request->tensor.get();
  tensor->request = std::move(request);
  ++num_in_flight_;
  if (tensor->request->callbacks.done != nullptr && num_with_function_++ == 0) {
    counted_until_ = tensor->request->enqueued_at;
  }
  return tensor;
}

void RequestTable::list_in_full(const NamedTensor& tensor) { in_full_[tensor.key] = tensor.request->tensor; }

bool RequestTable::is_agreed(NamedTensor* tensor) const {
  const std::shared_ptr<Operation>& operation = tensor->request->operation;
  if (tensor->id == NamedTensor::kNoId) return false;
  if (tensor->agreed == operation) return true;
  const Definition& definition = definitions_.at(tensor->id);
  Signature expected = definition.signature;
  put_varying(definition.varying_of(context_.options.rank), definition.varying_per_rank, &expected);
  if (expected != operation->signature) return false;
  tensor->agreed = operation;
  return true;
}

void RequestTable::define(const Record& record) {
  Definition& definition = definitions_[record.id];
  definition.signature = record.signature;
  definition.varying = record.varying;
  definition.varying_per_rank = record.varying_per_rank;
  adopt(record.id, &definition);
  if (definition.tensor != nullptr) definition.tensor->agreed = nullptr;
}

// Gives an id to a tensor that this rank has announced in full.
void RequestTable::adopt(TensorId id, Definition* definition) {
  auto waiting = in_full_.find(key_of(definition->signature.process_set, definition->signature.name));
  if (waiting == in_full_.end()) return;
  definition->tensor = std::move(waiting->second);
  definition->tensor->id = id;
  in_full_.erase(waiting);
}

std::shared_ptr<NamedTensor> RequestTable::forget(TensorId id) {
  auto found = definitions_.find(id);
  if (found == definitions_.end()) return nullptr;
  std::shared_ptr<NamedTensor> tensor = std::move(found->second.tensor);
  definitions_.erase(found);
  if (tensor == nullptr || tensor->id != id) return nullptr;
  context_.queue.forget_id(tensor.get());
  if (tensor->request == nullptr) return nullptr;
  in_full_[tensor->key] = tensor;
  // A request that is already announced in full stays so: because this rank had joined, the coordinator receives the
  // announcement only after it has written this record.
  if (tensor->announced_in_full) return nullptr;
  tensor->announced_in_full = true;
  return tensor;
}

const Definition* RequestTable::find(TensorId id) const {
  const auto found = definitions_.find(id);
  return found == definitions_.end() ? nullptr : &found->second;
}

Status RequestTable::find_tensors(const std::vector<TensorId>& ids, std::vector<NamedTensor*>* tensors) {
  tensors->clear();
  for (TensorId id : ids) {
    auto found = definitions_.find(id);
    // The tensor may have been defined while this rank had joined, and not have changed since.
    if (found != definitions_.end() && found->second.tensor == nullptr) adopt(id, &found->second);
    if (found == definitions_.end() || found->second.tensor == nullptr || found->second.tensor->request == nullptr) {
      return Status(HVL_JOB_BROKEN, "the log asks for a tensor that this rank has not announced (id " +
                                        std::to_string(id) + "): please report this as a defect of horovodlike");
    }
    tensors->push_back(found->second.tensor.get());
  }
  return Status();
}

std::shared_ptr<NamedTensor> RequestTable::take_by_name(const Signature& signature) {
  const std::string key = key_of(signature.process_set, signature.name);
  std::shared_ptr<NamedTensor> tensor;
  auto waiting = in_full_.find(key);
  if (waiting != in_full_.end()) {
    tensor = std::move(waiting->second);
    in_full_.erase(waiting);
    return tensor;
  }
  for (auto& [id, definition] : definitions_) {
    if (definition.tensor != nullptr && definition.tensor->key == key) tensor = definition.tensor;
  }
  return tensor;
}

void RequestTable::complete(NamedTensor* tensor, Status status, std::vector<hvl_output> outputs, GpuResultPtr on_gpu) {
  const std::unique_ptr<PendingRequest> request = std::move(tensor->request);
  --num_in_flight_;
  context_.counters.requests.fetch_add(1, std::memory_order_relaxed);
  context_.counters.bytes.fetch_add(request->operation->total_bytes, std::memory_order_relaxed);
  context_.counters.time.complete();
  if (tensor->announced_in_full) in_full_.erase(tensor->key);
  context_.queue.finish(*request, &status);  // first: a thread that sees the result may use the name again
  const hvl_callbacks& callbacks = request->callbacks;
  if (callbacks.done != nullptr) {
    for (hvl_output& output : outputs) free(output.data);  // the caller has no handle to ask for them
    // No thread waits in the engine; requests that are in flight at the same time count once.
    const uint64_t now = now_ns();
    context_.counters.blocked_time += static_cast<int64_t>(now - counted_until_);
    counted_until_ = now;
    --num_with_function_;
    callbacks.done(callbacks.context, status.code(), status.message().c_str());
  } else {
    context_.handles->complete(request->handle, std::move(status), std::move(outputs), std::move(on_gpu));
  }
}

void RequestTable::fail_all(const Status& status) {
  auto unknown = std::move(in_full_);
  in_full_.clear();
  for (auto& waiting : unknown) {
    if (waiting.second->request != nullptr) complete(waiting.second.get(), status);
  }
  for (auto& [id, definition] : definitions_) {
    NamedTensor* tensor = definition.tensor.get();
    if (tensor == nullptr) continue;
    if (tensor->request != nullptr) complete(tensor, status);
    tensor->agreed = nullptr;
  }
}

std::vector<const PendingRequest*> RequestTable::in_flight() const {
  std::vector<const PendingRequest*> requests;
  const auto add = [&](const NamedTensor* tensor) {
    if (tensor != nullptr && tensor->request != nullptr) requests.push_back(tensor->request.get());
  };
  for (const auto& waiting : in_full_) add(waiting.second.get());
  for (const auto& [id, definition] : definitions_) add(definition.tensor.get());
  std::sort(requests.begin(), requests.end(), [](const PendingRequest* one, const PendingRequest* other) {
    return std::tie(one->enqueued_at, one->handle, one) < std::tie(other->enqueued_at, other->handle, other);
  });
  // A request that is announced in full because it differs from its id's definition is in both maps.
  requests.erase(std::unique(requests.begin(), requests.end()), requests.end());
  return requests;
}

}  // namespace hvl
