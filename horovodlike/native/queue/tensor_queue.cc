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
  const int32_t number = request->operation->sequence;
  if (number == 0) {
    if (enqueue(&request)) return Status();
    return Status(HVL_INVALID_ARGUMENT,
                  "'" + request->signature().name +
                      "' is already in flight on this rank; wait for its result first, or use another name");
  }
  Sequence& sequence = sequences_[number];
  request->place = ++sequence.num_pushed;
  ++sequence.num_in_flight;
  if (sequence.waiting.empty() && enqueue(&request)) return Status();
  sequence.waiting.push_back(std::move(request));
  return Status();
}

bool TensorQueue::enqueue(std::unique_ptr<PendingRequest>* request) {
  const std::shared_ptr<NamedTensor> tensor = look_up((*request)->operation.get());
  if (tensor->in_flight.load()) return false;
  requests_.emplace_back();  // first, since it may throw
  tensor->in_flight.store(true);
  tensor->handle = (*request)->handle;
  (*request)->tensor = tensor;
  queued_bytes_.fetch_add((*request)->operation->total_bytes);
  requests_.back() = std::move(*request);
  queued_->fetch_add(1);
  return true;
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
  has_waited_.store(false);
}

void TensorQueue::finish(const PendingRequest& request, Status* status) {
  std::lock_guard<std::mutex> lock(mutex_);
  request.tensor->in_flight.store(false);
  if (request.tensor->id == NamedTensor::kNoId) erase(request.tensor.get());
  const auto sequence = sequences_.find(request.operation->sequence);
  if (sequence != sequences_.end()) {
    check_order(&sequence->second, request, status);
    if (--sequence->second.num_in_flight == 0 && sequence->second.disagreed_place == 0) sequences_.erase(sequence);
  }
  for (auto& [number, other] : sequences_) enqueue_waiting(&other);
}

// After a request about which the ranks disagreed, requests of the same name on two ranks may be different operations.
// Every rank announces them after the one that failed, so its error comes first in the log.
void TensorQueue::check_order(Sequence* sequence, const PendingRequest& request, Status* status) {
  if (status->code() == HVL_MISMATCH && sequence->disagreed_place == 0) {
    sequence->disagreed_place = request.place;
    sequence->disagreement = status->message();
  } else if (status->ok() && sequence->disagreed_place != 0 && request.place > sequence->disagreed_place) {
    *status = Status(HVL_MISMATCH, sequence->disagreement + " '" + request.signature().name +
                                       "' comes after that, and other ranks may have given another operation to it.");
  }
}

void TensorQueue::enqueue_waiting(Sequence* sequence) {
  while (!sequence->waiting.empty() && enqueue(&sequence->waiting.front())) {
    requests_.back()->enqueued_at = now_ns();
    has_waited_.store(true);
    sequence->waiting.pop_front();
  }
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
