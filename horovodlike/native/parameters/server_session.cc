#include "parameters/server_session.h"

#include <algorithm>
#include <utility>

namespace hvl {

namespace {

constexpr size_t kFetched = 8;                                  // payloads that are fetched ahead
constexpr size_t kReturned = 4;                                 // pulls whose elements are on their way
constexpr size_t kReplies = 128;                                // batches of replies that are on their way
constexpr uint64_t kMostElementsBytes = 2 * kMostPayloadBytes;  // elements of a command, with their ranges

}  // namespace

ServerSession::ServerSession(const std::string& client, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
                             ShardStore* store, std::function<void()> notify)
    : Session(client, std::move(stream), keys),
      store_(*store),
      notify_(std::move(notify)),
      runner_(new CommandRunner(store, this)) {}

ServerSession::~ServerSession() { close(); }  // before the memory goes

Status ServerSession::on_batch(Bytes batch) {
  num_waiting_bytes_ += batch.size();
  if (num_waiting_bytes_ > kMessageCredit) return wrong("more commands than it has credit for");
  batches_.push_back(std::move(batch));
  return run_commands();
}

Status ServerSession::on_elements(uint64_t number, uint64_t num_bytes) {
  if (num_bytes > kMostElementsBytes) return wrong("more elements than a command may have");
  if (number <= last_pushed_) return wrong("elements of one number twice, or in another order than their numbers");
  last_pushed_ = number;
  pushed_.push_back(Elements{number, nullptr, num_bytes, false});
  fetch_next();
  return Status();
}

void ServerSession::fetch_next() {
  const size_t most = can_copy() ? 1 : kFetched;
  for (size_t index = 0; index < std::min(most, pushed_.size()); ++index) {
    Elements& elements = pushed_[index];
    if (elements.memory != nullptr) continue;
    elements.memory = store_.buffers().take(elements.num_bytes);
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

void ServerSession::return_elements(uint64_t number, BufferPool::Pointer memory, uint64_t num_bytes) {
  if (memory == nullptr) return reply(Reply{number, Status()});
  const char* elements = memory.get();
  returned_[number] = std::move(memory);
  send_elements(number, elements, num_bytes);
}

void ServerSession::notify() {
  if (notify_ != nullptr) notify_();
}

Status ServerSession::before_sending() {
  budget_ = CommandRunner::kTimeSlice;
  return run_commands();
}

Status ServerSession::run_commands() {
  Status status;
  while (status.ok() && !batches_.empty() && num_batches_under_way() < kReplies && budget_ > 0) {
    if (!reader_.has_value()) reader_.emplace(batches_.front());
    if (!command_.has_value() && !reader_->is_at_end()) {
      status = reader_->read(&command_.emplace(), &inline_payload_);
      if (status.ok() && command_->number <= last_number_) return wrong("commands whose numbers do not rise");
      last_number_ = command_->number;
    }
    if (!status.ok()) return wrong(status.message());
    if (command_.has_value()) {
      bool done = true;
      status = run(*command_, &done);
      if (!done) return status;
      budget_ -= std::min(budget_, CommandRunner::cost_of(*command_));
      command_.reset();
    } else {
      num_waiting_bytes_ -= batches_.front().size();
      give_credit(batches_.front().size());
      reader_.reset();
      batches_.pop_front();
    }
  }
  return status;
}

Status ServerSession::run(const Command& command, bool* done) {
  const bool has_message = CommandRunner::has_large_payload(command);
  *done = (command.kind != Command::Kind::kPull || returned_.size() < kReturned) &&
          (!has_message || (!pushed_.empty() && pushed_.front().is_here));
  if (!*done) return Status();
  CommandRunner::Pushed payload{inline_payload_, command.num_inline};
  BufferPool::Pointer memory;
  if (has_message) {
    Elements elements = std::move(pushed_.front());
    pushed_.pop_front();
    fetch_next();
    if (elements.number != command.number) return wrong("elements in another order than their commands");
    payload = CommandRunner::Pushed{elements.memory.get(), elements.num_bytes};
    memory = std::move(elements.memory);
  }
  runner_->carry_out(command, payload);
  return Status();
}

}  // namespace hvl
