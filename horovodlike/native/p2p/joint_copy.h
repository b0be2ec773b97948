// The copy of a large message by both of its ranks, each of which copies the pieces that it claims: two cores take half
// the time.
//
// There is one at a time in each direction. The receiver begins it, and reads from the sender's memory. The sender
// writes to the receiver's memory while its engine runs; if it does not run, the receiver copies all pieces.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "shm/host_memory.h"

namespace hvl {

constexpr uint64_t kPieceBytes = uint64_t{256} << 10;
constexpr uint64_t kCopyPatience = 100 * kMillisecond;  // with a peer that copies, or has been killed meanwhile

class JointCopy {
 public:
  struct Piece {
    uint64_t id = 0;       // the message's
    uint64_t address = 0;  // the piece's, in the receiver's memory
    uint64_t offset = 0;
    uint64_t num_bytes = 0;
  };

  // `peer`: the local rank of the other rank.
  JointCopy(std::shared_ptr<HostMemory> memory, int peer, JointCopyBlock* block)
      : memory_(std::move(memory)), peer_(peer), block_(*block) {}

  // Both ranks. Claims the next piece; false: there is none left.
  bool claim(Piece* piece);
  bool has_pieces() const;

  // The receiver only.
  void begin(uint64_t id, const char* to, uint64_t num_bytes);
  // Counts a piece that the receiver has claimed as received: it copies the piece, or gives up the whole copy.
  void add(const Piece& piece) { num_received_ += piece.num_bytes; }
  bool is_complete() const { return num_received_ + block_.num_sent.load() == block_.num_bytes.load(); }
  // True if the sender could not copy a piece: some bytes are missing.
  bool has_failed() const { return block_.has_failed.load() != 0; }
  // Ends the claims, and waits for the pieces that the sender has claimed, so that the memory can be reused. It waits
  // 100 ms at most: the sender may have been killed. No other joint copy may begin in this direction afterwards.
  void close();

  // The sender only. False: the receiver has closed the copy, and a claimed piece must not be copied any more.
  bool is_open() const;
  // Ends a claimed piece. `is_copied`: false if the sender could not copy it.
  void end(const Piece& piece, bool is_copied);

 private:
  const std::shared_ptr<HostMemory> memory_;
  const int peer_;
  JointCopyBlock& block_;
  uint64_t num_received_ = 0;
};

}  // namespace hvl
