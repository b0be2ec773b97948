// The tensor queue: the requests that framework threads hand to the engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "queue/operation.h"

namespace hvl {

class TensorQueue {
 public:
  // `queued`: the counter in shared memory that shows other ranks how many requests wait to be taken.
  TensorQueue(uint64_t engine_number, std::atomic<uint32_t>* queued) : engine_number_(engine_number), queued_(queued) {}

  // Any thread. Fails if the queue is closed, or if the name is in flight already and the request is in no sequence.
  Status push(std::unique_ptr<PendingRequest> request);

  // Any thread: the handle of the request in flight under the operation's name; 0: there is none.
  int64_t handle_in_flight(Operation* operation);

  // The engine: takes all requests that came since the last call; `requests` is empty.
  void take(std::vector<std::unique_ptr<PendingRequest>>* requests);
  // The engine: the request completes with this status, and its name is free again. Queues requests of sequences that
  // waited for the name. Overwrites a status that is ok if the ranks disagreed about one before it in the sequence.
  void finish(const PendingRequest& request, Status* status);
  // The engine: the tensor's id is no longer defined.
  void forget_id(NamedTensor* tensor);
  // The engine: after this every push fails with `status`.
  void close(const Status& status);

  // Any thread: ok while the queue is open; then the status of close().
  Status closed() const;
  // Any thread: the bytes of the requests that wait to be taken.
  int64_t queued_bytes() const { return queued_bytes_.load(); }
  // Any thread: whether a request has waited in a sequence since the last take(): it is not to be deferred again.
  bool has_waited() const { return has_waited_.load(); }
  bool empty() const { return queued_->load() == 0; }

 private:
  struct Sequence {
    std::list<std::unique_ptr<PendingRequest>> waiting;  // the first for its name, the others for the first
    uint64_t num_pushed = 0;
    uint64_t num_in_flight = 0;    // pushed and not complete
    uint64_t disagreed_place = 0;  // of the request about which the ranks disagreed; 0: none
    std::string disagreement;
  };

  // All of these need mutex_.
  // Returns false if the request's name is in flight: then *request stays as it is.
  [[nodiscard]] bool enqueue(std::unique_ptr<PendingRequest>* request);
  std::shared_ptr<NamedTensor> look_up(Operation* operation);
  void check_order(Sequence* sequence, const PendingRequest& request, Status* status);
  void enqueue_waiting(Sequence* sequence);
  // Removes a name that has no id and is not in flight, so that ever new names take no more memory.
  void erase(NamedTensor* tensor);

  const uint64_t engine_number_;
  std::atomic<uint32_t>* const queued_;  // written under mutex_
  std::atomic<int64_t> queued_bytes_{0};
  mutable std::mutex mutex_;  // a leaf lock
  std::vector<std::unique_ptr<PendingRequest>> requests_;
  std::unordered_map<std::string, std::shared_ptr<NamedTensor>> names_;
  std::unordered_map<int32_t, Sequence> sequences_;  // in flight, or with a disagreement
  std::atomic<bool> has_waited_{false};
  Status closed_;
};

// The process set is part of a name's identity.
std::string key_of(int32_t process_set, const std::string& name);

}  // namespace hvl
