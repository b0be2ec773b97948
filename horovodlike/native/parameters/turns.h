// The turns in which the thread of a server carries out the commands of its clients.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parameters/shard_store.h"

namespace hvl {

// Of one client.
class Turns {
 public:
  static constexpr uint64_t kCost = 2 * kUsualPieceBytes;  // of all commands of a turn

  // `store` must live longer.
  explicit Turns(const ShardStore* store) : store_(*store) {}

  // True if the command takes a whole turn: a client pushes or pulls so many consecutive elements that it matters
  // whether they are in the cache.
  static bool takes_turn(const Command& command) {
    const bool moves = command.kind == Command::Kind::kPush || command.kind == Command::Kind::kPull;
    return moves && !command.is_forwarded && command.part == Part::kValues && command.num_ranges == 0 &&
           command.range.count >= kBlockElements;
  }
  // The bytes of the elements of a command, if each had 8, and a little more; or the cost of a whole turn.
  static uint64_t cost_of(const Command& command) {
    const uint64_t most = kCost / sizeof(double);
    return kMostCommandBytes + (takes_turn(command) ? most : std::min(command.range.count, most)) * sizeof(double);
  }
  // Called with a command that could be carried out. True: the client leaves out this turn. It does so every second
  // time while it is ahead of another one in a shard. So that one catches up, and from then on finds in the cache what
  // the first one has used.
  bool leave_out(const Command& command) {
    const StoredShard* shard = takes_turn(command) ? store_.find(command.shard) : nullptr;
    const bool is_ahead = shard != nullptr && command.range.offset > shard->front;
    has_left_out_ = is_ahead && !has_left_out_;
    return has_left_out_;
  }

 private:
  const ShardStore& store_;
  bool has_left_out_ = false;
};

}  // namespace hvl
