#include "parameters/own_client.h"

#include <utility>

namespace hvl {

void OwnClient::progress(bool* progressed) {
  for (uint64_t used = 0; used < Turns::kCost && !waiting_.empty();) {
    Piece* piece = waiting_.front();
    waits_for_room_ = !runner_.has_room_for(piece->command);
    if (waits_for_room_ || turns_.leave_out(piece->command)) break;
    piece->set_number(next_number_++);
    pending_[piece->command.number] = piece;
    waiting_.pop_front();  // after the insertion, which may throw
    used += Turns::cost_of(piece->command);
    runner_.carry_out(piece->command, CommandRunner::Pushed{piece->sent, piece->num_sent}, nullptr);
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
  Piece* piece = found->second;
  pending_.erase(found);
  piece->end(piece->take(reply, server_), on_end_);
}

void OwnClient::notify() {
  waits_for_room_ = false;
  notify_();
}

void OwnClient::fail(const Status& status) {
  replies_.clear();
  for (const auto& [number, piece] : std::exchange(pending_, {})) piece->end(status, on_end_);
  for (Piece* piece : std::exchange(waiting_, {})) piece->end(status, on_end_);
}

}  // namespace hvl
