// A large message that both of its ranks copy, each the pieces that it claims: two cores take half the time.
//
// There is one at a time and direction. The receiver begins it, and reads from the sender's memory; the sender writes
// to the receiver's memory, when its engine runs. If it does not run, the receiver copies everything.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "shm/host_memory.h"

namespace hvl {

constexpr uint64_t kPieceBytes = uint64_t{256} << 10;

class JointCopy {
 public:
  struct Piece {
    uint64_t id = 0;       // of the message
    uint64_t address = 0;  // of the piece, in the receiver's memory
    uint64_t offset = 0;
    uint64_t num_bytes = 0;
  };

  // `peer`: the local rank of the other one.
  JointCopy(std::shared_ptr<HostMemory> memory, int peer, JointCopyBlock* block)
      : memory_(std::move(memory)), peer_(peer), block_(*block) {}

  // Either rank claims the next piece; false: there is none.
  bool claim(Piece* piece);
  bool has_pieces() const;

  // For the receiver.
  void begin(uint64_t id, const char* to, uint64_t num_bytes);
  // The receiver does not copy a piece any more that it has claimed: most often it has copied it.
  void add(const Piece& piece) { num_received_ += piece.num_bytes; }
  bool is_complete() const { return num_received_ + block_.num_sent.load() == block_.num_bytes.load(); }
  // The sender could not copy: some of the bytes are not there.
  bool has_failed() const { return block_.has_failed.load() != 0; }
  // Ends the claims, and waits for the pieces that the sender has claimed, so that the memory can be used otherwise. It
  // waits 100 ms at most: the sender may have been killed. There must be no other joint copy in this direction then.
  void close();

  // For the sender. False: the receiver has closed the copy, and a claimed piece is not to be copied.
  bool is_open() const;
  // The sender has copied a piece that it has claimed, or could not.
  void end(const Piece& piece, bool is_copied);

 private:
  const std::shared_ptr<HostMemory> memory_;
  const int peer_;
  JointCopyBlock& block_;
  uint64_t num_received_ = 0;
};

}  // namespace hvl
