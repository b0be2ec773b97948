#include "parameters/server_session.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hvl {

namespace {

constexpr size_t kFetched = 2;   // pushes whose elements are fetched ahead
constexpr size_t kReturned = 4;  // pulls whose elements are on their way

}  // namespace

ServerSession::ServerSession(const std::string& client, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
                             Shards* shards)
    : Session(client, std::move(stream), keys), shards_(*shards) {}

Status ServerSession::on_batch(Bytes batch) {
  batches_.push_back(std::move(batch));
  return run_commands();
}

Status ServerSession::on_elements(uint64_t number, uint64_t num_bytes) {
  if (num_bytes > kBlockElements * sizeof(double) * 2) return wrong("more elements than a piece may have");
  pushed_.push_back(Elements{number, nullptr, num_bytes, false});
  fetch_next();
  return Status();
}

void ServerSession::fetch_next() {
  for (size_t index = 0; index < std::min(kFetched, pushed_.size()); ++index) {
    Elements& elements = pushed_[index];
    if (elements.memory != nullptr) continue;
    elements.memory.reset(new char[std::max<uint64_t>(elements.num_bytes, 1)]);
    fetch(elements.number, elements.memory.get());
  }
}

Status ServerSession::on_fetched(uint64_t number) {
  const auto found =
      std::find_if(pushed_.begin(), pushed_.end(), [&](const Elements& each) { return each.number == number; });
  found->is_here = true;
  return run_commands();
}

Status ServerSession::on_sent(uint64_t number) {
  returned_.erase(number);
  return run_commands();
}

Status ServerSession::run_commands() {
  Status status;
  while (status.ok() && !batches_.empty()) {
    if (!reader_.has_value()) reader_.emplace(batches_.front());
    if (!command_.has_value() && !reader_->is_at_end()) {
      status = reader_->read(&command_.emplace(), &inline_elements_);
    }
    if (!status.ok()) return wrong(status.message());
    if (command_.has_value()) {
      bool done = true;
      status = run(*command_, inline_elements_, &done);
      if (!done) return status;
      command_.reset();
    } else {
      give_credit(batches_.front().size());
      reader_.reset();
      batches_.pop_front();
    }
  }
  return status;
}

Status ServerSession::run(const Command& command, const char* elements, bool* done) {
  if (command.kind == Command::Kind::kPull) {
    *done = returned_.size() < kReturned;
    if (!*done) return Status();
    Status status = pull(command);
    if (!status.ok()) put(Reply{command.number, std::move(status)});
    return Status();
  }
  if (!has_payload(command.update.rule) || command.num_inline > 0 || command.count == 0) {
    put(Reply{command.number, push(command, elements, command.num_inline)});
    return Status();
  }
  *done = !pushed_.empty() && pushed_.front().is_here;
  if (!*done) return Status();
  const Elements pushed = std::move(pushed_.front());
  pushed_.pop_front();
  fetch_next();
  if (pushed.number != command.number) return wrong("elements in another order than their commands");
  put(Reply{command.number, push(command, pushed.memory.get(), pushed.num_bytes)});
  return Status();
}

Status ServerSession::push(const Command& command, const char* elements, uint64_t num_bytes) const {
  const auto shard = shards_.find(command.shard);
  if (shard == shards_.end()) return Status(HVL_INVALID_ARGUMENT, "there is no shard of this number");
  const uint64_t width = size_of(shard->second->dtype());
  const uint64_t expected = has_payload(command.update.rule) ? command.count : 0;
  if (num_bytes % width != 0 || num_bytes / width != expected) {
    return Status(HVL_MISMATCH, std::to_string(num_bytes) + " bytes were pushed for " + std::to_string(expected) +
                                    " elements of " + name_of(shard->second->dtype()));
  }
  return shard->second->apply(command.update, command.offset, command.count, elements);
}

// The elements are copied, since later pushes may change them before they are sent.
Status ServerSession::pull(const Command& command) {
  const auto shard = shards_.find(command.shard);
  if (shard == shards_.end()) return Status(HVL_INVALID_ARGUMENT, "there is no shard of this number");
  const Status status = shard->second->check_range(command.offset, command.count);
  if (!status.ok()) return status;
  const uint64_t width = size_of(shard->second->dtype()), num_bytes = command.count * width;
  Elements& elements = returned_[command.number];
  elements.memory.reset(new char[std::max<uint64_t>(num_bytes, 1)]);
  std::memcpy(elements.memory.get(), shard->second->values() + command.offset * width, num_bytes);
  send_elements(command.number, elements.memory.get(), num_bytes);
  return Status();
}

}  // namespace hvl
