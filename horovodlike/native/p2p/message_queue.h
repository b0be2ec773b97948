// The sends and receives that framework threads hand to the engine.
#pragma once

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "base/status.h"
#include "p2p/message_request.h"

namespace hvl {

class MessageQueue {
 public:
  // Any thread. Fails if the queue is closed.
  Status push(MessageRequestPtr request) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_.ok()) return closed_;
    requests_.push_back(std::move(request));
    has_requests_.store(true);
    return Status();
  }
  bool empty() const { return !has_requests_.load(); }

  // The engine: takes all requests that came since the last call; `requests` is empty.
  void take(std::vector<MessageRequestPtr>* requests) {
    const std::lock_guard<std::mutex> lock(mutex_);
    requests->swap(requests_);
    has_requests_.store(false);
  }
  // The engine: after this every push fails with `status`.
  void close(const Status& status) {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = status;
  }

 private:
  std::mutex mutex_;  // a leaf lock
  std::vector<MessageRequestPtr> requests_;
  std::atomic<bool> has_requests_{false};
  Status closed_;
};

}  // namespace hvl
