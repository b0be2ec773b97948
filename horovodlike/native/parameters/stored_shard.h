// A shard with its place in the chain of two servers that keep it.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "parameters/command.h"
#include "parameters/shard.h"

namespace hvl {

enum class Role : uint8_t {
  kPrimary,     // the clients send their commands to this server
  kIncomplete,  // a copy that has not all parts yet
  kReplica      // a copy, which becomes the primary if a client sends a command to it when that is lost
};

// Whether another server has a copy of a primary's shard.
enum class CopyState : uint8_t { kNone, kUnderWay, kComplete };

// A session whose commands may have to wait for a replica.
class CommandOwner {
 public:
  virtual ~CommandOwner() = default;
  // A reply to a command, or the release of the elements that a pull returns.
  virtual void on_settled(const Reply& reply) = 0;
  // There is room for changes again.
  virtual void on_room() = 0;

  uint64_t last_forwarded = 0;  // the time of the last command of a primary
};

struct StoredShard : Shard {
  StoredShard(const ShardId& of, DataType dtype, uint64_t count) : Shard(dtype, count), id(of) {}

  // False: the change has been made before.
  bool is_new(const Command& change) const {
    const auto mark = marks.find(change.client);
    return change.sequence == 0 || mark == marks.end() || mark->second < change.sequence;
  }
  void mark(const Command& change) {
    if (change.sequence > 0 && ring.ring != 0) marks[change.client] = change.sequence;
  }

  const ShardId id;
  RingInfo ring;
  Role role = Role::kPrimary;
  CommandOwner* source = nullptr;                // of a copy: the session with the primary; null: it has ended
  CopyState copy = CopyState::kNone;             // of a primary
  uint64_t paused_at = 0;                        // of a primary; 0: its replica has answered since, see Replicator
  bool has_changed = false;                      // since it was created
  uint64_t front = 0;                            // the end of the range of the last push or pull
  std::unordered_map<uint64_t, uint64_t> marks;  // by client: the sequence of the last change
  std::vector<std::pair<CommandOwner*, uint64_t>> awaiting;  // commands that wait for a copy: their owners and numbers
};

}  // namespace hvl
