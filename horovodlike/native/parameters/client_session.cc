#include "parameters/client_session.h"

#include <utility>

namespace hvl {

ClientSession::ClientSession(const std::string& server, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
                             OnEnd on_end)
    : Session(server, std::move(stream), keys), on_end_(std::move(on_end)) {}

uint64_t ClientSession::push(const Update& update, uint32_t shard, uint64_t offset, uint64_t count,
                             const char* elements, uint64_t num_bytes) {
  Command command;
  command.update = update;
  command.shard = shard;
  command.number = next_number_++;
  command.offset = offset;
  command.count = count;
  command.num_inline = num_bytes <= kInlineBytes ? num_bytes : 0;
  pending_[command.number] = Pending();
  put(command, elements);
  if (num_bytes > kInlineBytes) send_elements(command.number, elements, num_bytes);
  return command.number;
}

uint64_t ClientSession::pull(uint32_t shard, uint64_t offset, uint64_t count, char* elements, uint64_t num_bytes) {
  Command command;
  command.kind = Command::Kind::kPull;
  command.shard = shard;
  command.number = next_number_++;
  command.offset = offset;
  command.count = count;
  pending_[command.number] = Pending{command.kind, elements, num_bytes};
  put(command, nullptr);
  return command.number;
}

Status ClientSession::on_batch(Bytes batch) {
  BatchReader reader(batch);
  Status status;
  while (status.ok() && !reader.is_at_end()) {
    Reply reply;
    status = reader.read(&reply);
    if (!status.ok()) break;
    const auto found = pending_.find(reply.number);
    const bool fits = found != pending_.end() && (found->second.kind == Command::Kind::kPush || !reply.status.ok());
    if (!fits) return wrong("a reply to no command");
    end(reply.number, reply.status);
  }
  give_credit(batch.size());
  return status;
}

Status ClientSession::on_elements(uint64_t number, uint64_t num_bytes) {
  const auto found = pending_.find(number);
  if (found == pending_.end() || found->second.kind != Command::Kind::kPull || found->second.num_bytes != num_bytes) {
    return wrong("elements that were not asked for");
  }
  fetch(number, found->second.elements);
  return Status();
}

Status ClientSession::on_fetched(uint64_t number) {
  end(number, Status());
  return Status();
}

// The server's reply ends the push.
Status ClientSession::on_sent(uint64_t) { return Status(); }

void ClientSession::end(uint64_t number, const Status& status) {
  if (pending_.erase(number) > 0) on_end_(number, status);
}

void ClientSession::fail(const Status& status) {
  for (const auto& [number, command] : std::exchange(pending_, {})) on_end_(number, status);
}

}  // namespace hvl
