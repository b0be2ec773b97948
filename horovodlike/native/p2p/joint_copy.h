// A large message that both of its ranks copy, each the pieces that it claims: on two cores in half the time.
//
// There is one at a time and direction. The receiver begins it; the sender helps when its engine runs, and if it does
// not, the receiver copies everything. Both know each other's addresses: the receiver reads, and the sender writes.
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

  // Claims the next piece; false: there is none. Either rank.
  bool claim(Piece* piece);
  bool has_pieces() const;

  // The rest but for the last function is for the receiver.
  void begin(uint64_t id, const char* to, uint64_t num_bytes);
  // A piece that it has claimed is in its memory.
  void add(const Piece& piece) { num_received_ += piece.num_bytes; }
  bool is_complete() const { return num_received_ + block_.num_sent.load() == block_.num_bytes.load(); }
  // The sender could not copy: some of the bytes are not there.
  bool has_failed() const { return block_.has_failed.load() != 0; }
  // No piece can be claimed any more. Waits until the sender has copied those that it has claimed, so that the memory
  // can be used otherwise; not for long, as a sender that does not come back has ended.
  void close();

  // The sender has copied a piece that it has claimed, or could not.
  void end(const Piece& piece, bool is_copied);

 private:
  const std::shared_ptr<HostMemory> memory_;
  const int peer_;
  JointCopyBlock& block_;
  uint64_t num_received_ = 0;
};

}  // namespace hvl
