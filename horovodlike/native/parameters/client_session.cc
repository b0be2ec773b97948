#include "parameters/client_session.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace hvl {

namespace {

// The limits of the bytes on their way to the server. It drops a client that sends more than it must keep.
constexpr size_t kMostLarge = 64;
constexpr uint64_t kMostBatchBytes = kMessageCredit / 2 - 8 * kEagerBytes;

}  // namespace

// Each command may be a batch by itself.
uint64_t ClientSession::cost_of(const ClientCommand& command) {
  return credit_of(kMostCommandBytes) + (command.is_large() ? 0 : command.num_sent);
}

bool ClientSession::has_room_for(const ClientCommand& command) const {
  return num_batch_bytes_ + cost_of(command) <= kMostBatchBytes && (!command.is_large() || num_large_ < kMostLarge);
}

// The commands come first, so that the server can carry out the first one when it has its elements.
Status ClientSession::before_sending() {
  std::vector<const ClientCommand*> large;
  while (can_call()) {
    ClientCommand* command = waiting_.front();
    command->set_number(next_number_++);
    command->address = stream().can_copy() ? reinterpret_cast<uintptr_t>(command->received) : 0;
    pending_[command->number] = command;
    waiting_.pop_front();  // after the insertion, which may throw
    num_batch_bytes_ += cost_of(*command);
    put(*command, command->sent);
    if (!command->is_large()) continue;
    ++num_large_;
    large.push_back(command);
  }
  if (!large.empty()) flush();
  for (const ClientCommand* command : large) send_elements(command->number, command->sent, command->num_sent);
  return Status();
}

void ClientSession::leave() {
  Command command;
  command.kind = Command::Kind::kLeave;
  command.number = next_number_++;
  put(command, nullptr);
}

Status ClientSession::on_batch(Bytes batch) {
  BatchReader reader(batch);
  Status status;
  while (status.ok() && !reader.is_at_end()) {
    Reply reply;
    status = reader.read(&reply);
    if (!status.ok()) break;
    const auto found = pending_.find(reply.number);
    const bool fits = found != pending_.end() && (found->second->kind != Command::Kind::kPull ||
                                                  found->second->address != 0 || !reply.status.ok());
    if (!fits) return wrong("a reply to no command");
    if (found->second->is_coming) return wrong("an error behind the elements");
    if (found->second->is_large() && !found->second->is_sent) return wrong("a reply before it has the elements");
    end(reply.number, status_of(reply, peer()));
  }
  give_credit(batch.size());
  return status;
}

Status ClientSession::on_elements(uint64_t number, uint64_t num_bytes) {
  const auto found = pending_.find(number);
  if (found == pending_.end() || found->second->kind != Command::Kind::kPull ||
      found->second->num_received != num_bytes || std::exchange(found->second->is_coming, true)) {
    return wrong("elements that were not asked for");
  }
  fetch(number, found->second->received);
  return Status();
}

Status ClientSession::on_fetched(uint64_t number) {
  end(number, Status());
  return Status();
}

// The server's reply ends the push.
Status ClientSession::on_sent(uint64_t number) {
  const auto found = pending_.find(number);
  if (found != pending_.end()) found->second->is_sent = true;
  return Status();
}

void ClientSession::end(uint64_t number, const Status& status) {
  const auto found = pending_.find(number);
  if (found == pending_.end()) return;
  ClientCommand* command = found->second;
  pending_.erase(found);
  num_batch_bytes_ -= cost_of(*command);
  if (command->is_large()) --num_large_;
  on_end_(command, status);
}

void ClientSession::fail(const Status& status) {
  for (const auto& [number, command] : std::exchange(pending_, {})) on_end_(command, status);
  for (ClientCommand* command : std::exchange(waiting_, {})) on_end_(command, status);
}

}  // namespace hvl
