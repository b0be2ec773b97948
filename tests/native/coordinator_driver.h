// A coordinator with its decisions as short texts, so that a test reads like the log that it expects.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "negotiate/coordinator.h"

inline hvl::Signature allreduce_of(const std::string& name, const hvl::Shape& shape = {4}) {
  hvl::Signature signature;
  signature.name = name;
  signature.tensors = {{HVL_FLOAT32, shape}};
  return signature;
}

inline hvl::Signature allgather_of(const std::string& name, const hvl::Shape& shape) {
  hvl::Signature signature = allreduce_of(name, shape);
  signature.kind = HVL_ALLGATHER;
  return signature;
}

// One that has a root.
inline hvl::Signature rooted_of(hvl::Kind kind, const std::string& name, int root, const hvl::Shape& shape = {4}) {
  hvl::Signature signature = allreduce_of(name, shape);
  signature.kind = kind;
  signature.root = root;
  return signature;
}

inline hvl::Signature broadcast_of(const std::string& name, int root) { return rooted_of(HVL_BROADCAST, name, root); }

inline hvl::Signature barrier_of(const std::string& name) {
  hvl::Signature signature;
  signature.name = name;
  signature.kind = HVL_BARRIER;
  return signature;
}

inline hvl::Signature join_of(int32_t process_set = 0, const std::string& name = "join") {
  hvl::Signature signature = barrier_of(name);
  signature.kind = HVL_JOIN;
  signature.process_set = process_set;
  return signature;
}

inline hvl::Signature add_of(const std::vector<int64_t>& ranks) {
  hvl::Signature signature = barrier_of("add");
  signature.kind = HVL_ADD_PROCESS_SET;
  signature.arguments = ranks;
  return signature;
}

inline hvl::Signature of_set(int32_t process_set, hvl::Signature signature) {
  signature.process_set = process_set;
  return signature;
}

inline hvl::CoordinatorOptions options_of(int size) {
  hvl::CoordinatorOptions options;
  options.size = size;
  return options;
}

// "define 1 a", "define 2 a for 1", "execute 1 2", "error a", "evict 1", "shutdown"
inline std::string text_of(const hvl::Record& record) {
  using Type = hvl::Record::Type;
  std::string ids;
  for (hvl::TensorId id : record.ids) ids += " " + std::to_string(id);
  switch (record.type) {
    case Type::kDefine:
      return "define " + std::to_string(record.id) + " " + record.signature.name +
             (record.replaces != 0 ? " for " + std::to_string(record.replaces) : "");
    case Type::kExecute: return "execute" + ids;
    case Type::kError: return "error " + record.signature.name;
    case Type::kEvict: return "evict" + ids;
    case Type::kShutdown: return "shutdown";
  }
  return "?";
}

class CoordinatorDriver {
 public:
  explicit CoordinatorDriver(const hvl::CoordinatorOptions& options) : coordinator(options), size_(options.size) {}
  explicit CoordinatorDriver(int size) : CoordinatorDriver(options_of(size)) {}

  // The error, or "".
  std::string request(int rank, const hvl::Signature& signature, uint64_t now = 0) {
    hvl::Message message;
    message.type = hvl::Message::Type::kRequest;
    message.signature = signature;
    return coordinator.on_message(rank, message, now).message();
  }
  std::string ready(int rank, std::vector<hvl::TensorId> ids, uint64_t now = 0) {
    hvl::Message message;
    message.ids = std::move(ids);
    return coordinator.on_message(rank, message, now).message();
  }
  std::string shut_down(int rank, const std::string& text) {
    hvl::Message message;
    message.type = hvl::Message::Type::kShutdown;
    message.text = text;
    return coordinator.on_message(rank, message, 0).message();
  }
  void request_all(const hvl::Signature& signature) {
    for (int rank = 0; rank < size_; ++rank) request(rank, signature);
  }
  void ready_all(const std::vector<hvl::TensorId>& ids) {
    for (int rank = 0; rank < size_; ++rank) ready(rank, ids);
  }

  // The records decided since the last call, joined by "; ".
  std::string decide() {
    last.clear();
    coordinator.decide(&last);
    std::string text;
    for (const hvl::Decision& decision : last) text += (text.empty() ? "" : "; ") + text_of(decision.record);
    return text;
  }

  hvl::Coordinator coordinator;
  std::vector<hvl::Decision> last;

 private:
  int size_;
};
