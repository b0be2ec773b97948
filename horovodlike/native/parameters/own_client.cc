#include "parameters/own_client.h"

#include <utility>

namespace hvl {

void OwnClient::progress(bool* progressed) {
  for (uint64_t used = 0; used < CommandRunner::kTimeSlice && !waiting_.empty();) {
    ClientCommand* command = waiting_.front();
    command->set_number(next_number_++);
    pending_[command->number] = command;
    waiting_.pop_front();  // after the insertion, which may throw
    used += CommandRunner::cost_of(*command);
    runner_.carry_out(*command, CommandRunner::Pushed{command->sent, command->num_sent});
    *progressed = true;
  }
  for (const Reply& reply : std::exchange(replies_, {})) {
    end(reply);
    *progressed = true;
  }
}

void OwnClient::end(const Reply& reply) {
  const auto found = pending_.find(reply.number);
  if (found == pending_.end()) return;
  ClientCommand* command = found->second;
  pending_.erase(found);
  on_end_(command, status_of(reply, server_));
}

void OwnClient::fail(const Status& status) {
  replies_.clear();
  for (const auto& [number, command] : std::exchange(pending_, {})) on_end_(command, status);
  for (ClientCommand* command : std::exchange(waiting_, {})) on_end_(command, status);
}

}  // namespace hvl
