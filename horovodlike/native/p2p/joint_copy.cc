#include "p2p/joint_copy.h"

#include <sched.h>

#include <algorithm>

#include "base/clock.h"

namespace hvl {

namespace {

// JointCopyBlock::next has the copy's number in its upper half, and the next piece's number in its lower half. So a
// claim fails if another copy has begun since the rank read the addresses.
constexpr int kBitsOfPiece = 32;
constexpr uint64_t kClosed = UINT32_MAX;

constexpr uint64_t piece_of(uint64_t next) { return next & kClosed; }

}  // namespace

bool JointCopy::claim(Piece* piece) {
  uint64_t next = block_.next.load();
  do {
    const uint64_t num_bytes = block_.num_bytes.load();
    piece->offset = piece_of(next) * kPieceBytes;
    if (piece_of(next) == kClosed || piece->offset >= num_bytes) return false;
    piece->id = block_.id.load();
    piece->address = block_.address.load() + piece->offset;
    piece->num_bytes = std::min(kPieceBytes, num_bytes - piece->offset);
  } while (!block_.next.compare_exchange_weak(next, next + 1));
  return true;
}

bool JointCopy::has_pieces() const {
  const uint64_t piece = piece_of(block_.next.load());
  return piece != kClosed && piece * kPieceBytes < block_.num_bytes.load();
}

bool JointCopy::is_open() const { return piece_of(block_.next.load()) != kClosed; }

// Ends the claims first: else the sender could claim a piece of the last copy with values of the new one.
void JointCopy::begin(uint64_t id, const char* to, uint64_t num_bytes) {
  const uint64_t last = block_.next.fetch_or(kClosed) >> kBitsOfPiece;
  num_received_ = 0;
  block_.num_sent.store(0);
  block_.has_failed.store(0);
  block_.id.store(id);
  block_.address.store(reinterpret_cast<uintptr_t>(to));
  block_.num_bytes.store(num_bytes);
  block_.next.store((last + 1) << kBitsOfPiece);
  memory_->notify_message(peer_, kWakeMessage);
}

void JointCopy::close() {
  const uint64_t piece = piece_of(block_.next.fetch_or(kClosed));
  if (piece == kClosed) return;
  const uint64_t num_claimed = std::min(piece * kPieceBytes, block_.num_bytes.load());
  const uint64_t deadline = now_ns() + kCopyPatience;
  while (num_received_ + block_.num_sent.load() < num_claimed && now_ns() < deadline) sched_yield();
}

void JointCopy::end(const Piece& piece, bool is_copied) {
  if (!is_copied) block_.has_failed.store(1);
  block_.num_sent.fetch_add(piece.num_bytes);
  memory_->notify_message(peer_, kWakeMessage);
}

}  // namespace hvl
