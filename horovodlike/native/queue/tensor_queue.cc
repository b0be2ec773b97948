#include "queue/tensor_queue.h"

#include <utility>

#include "base/clock.h"

namespace hvl {

std::string key_of(int32_t process_set, const std::string& name) { return std::to_string(process_set) + ':' + name; }

std::shared_ptr<NamedTensor> TensorQueue::look_up(Operation* operation) {
  if (operation->engine != engine_number_ || operation->tensor->forgotten.load()) {
    std::string key = key_of(operation->signature.process_set, operation->signature.name);
    std::shared_ptr<NamedTensor>& tensor = names_[key];
    if (tensor == nullptr) tensor = std::make_shared<NamedTensor>(key);
    operation->tensor = tensor;
    operation->engine = engine_number_;
  }
  return operation->tensor;
}

Status TensorQueue::push(std::unique_ptr<PendingRequest> request) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!closed_.ok()) return closed_;
  request->tensor = look_up(request->operation.get());
  NamedTensor& tensor = *request->tensor;
  const bool is_in_flight = tensor.in_flight.exchange(true);
  if (is_in_flight && !request->operation->follows) {
    return Status(HVL_INVALID_ARGUMENT,
                  "'" + request->signature().name +
                      "' is already in flight on this rank; wait for its result first, or use another name");
  }
  tensor.handle = request->handle;
  if (is_in_flight) {
    tensor.followers.push_back(std::move(request));
  } else {
    enqueue(std::move(request));
  }
  return Status();
}

void TensorQueue::enqueue(std::unique_ptr<PendingRequest> request) {
  queued_bytes_.fetch_add(request->operation->total_bytes);
  requests_.push_back(std::move(request));
  queued_->fetch_add(1);
}

int64_t TensorQueue::handle_in_flight(Operation* operation) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = names_.find(key_of(operation->signature.process_set, operation->signature.name));
  return found != names_.end() && found->second->in_flight.load() ? found->second->handle : 0;
}

void TensorQueue::take(std::vector<std::unique_ptr<PendingRequest>>* requests) {
  std::lock_guard<std::mutex> lock(mutex_);
  requests->swap(requests_);
  queued_->store(0);
  queued_bytes_.store(0);
}

void TensorQueue::finish(const PendingRequest& request) {
  std::lock_guard<std::mutex> lock(mutex_);
  NamedTensor& tensor = *request.tensor;
  if (!tensor.followers.empty()) {
    enqueue(std::move(tensor.followers.front()));
    tensor.followers.pop_front();
    return;
  }
  tensor.in_flight.store(false);
  if (tensor.id == NamedTensor::kNoId) erase(&tensor);
}

void TensorQueue::forget_id(NamedTensor* tensor) {
  std::lock_guard<std::mutex> lock(mutex_);
  tensor->id = NamedTensor::kNoId;
  tensor->agreed = nullptr;
  if (!tensor->in_flight.load()) erase(tensor);
}

void TensorQueue::erase(NamedTensor* tensor) {
  if (!tensor->forgotten.exchange(true)) names_.erase(tensor->key);
}

void TensorQueue::close(const Status& status) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_.ok()) closed_ = status;
}

Status TensorQueue::closed() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return closed_;
}

}  // namespace hvl
