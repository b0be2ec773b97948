#include "parameters/own_client.h"

#include <utility>

namespace hvl {

namespace {

constexpr uint64_t kTurnBytes = uint64_t{256} << 10;  // bytes of elements in a progress()

}  // namespace

void OwnClient::progress(bool* progressed) {
  for (uint64_t used = 0; used < kTurnBytes && !waiting_.empty();) {
    Piece* piece = waiting_.front();
    waits_for_room_ = !runner_.has_room_for(piece->command);
    if (waits_for_room_) break;
    waiting_.pop_front();
    used += kMostCommandBytes + piece->num_sent + piece->num_received;
    run(piece);
    *progressed = true;
  }
  for (const Reply& reply : std::exchange(replies_, {})) {
    end(reply);
    *progressed = true;
  }
}

void OwnClient::run(Piece* piece) {
  piece->set_number(next_number_);
  pending_[next_number_++] = piece;
  runner_.carry_out(piece->command, CommandRunner::Pushed{piece->sent, piece->num_sent}, nullptr);
}

// The elements go where the caller wants them, since no one sees them before the command has ended.
BufferPool::Pointer OwnClient::memory_for(uint64_t number, uint64_t num_bytes) {
  const Piece& piece = *pending_.at(number);
  return BufferPool::Pointer(piece.num_received == num_bytes ? piece.received : nullptr, {});
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
