// The shards of a server, the clocks of their arrays, and the rules of the user: for all sessions of its clients.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "parameters/buffer_pool.h"
#include "parameters/clocks.h"
#include "parameters/command.h"
#include "parameters/replicator.h"
#include "parameters/stored_shard.h"

namespace hvl {

// For one thread.
class ShardStore {
 public:
  ShardStore() = default;
  ShardStore(const ShardStore&) = delete;
  ShardStore& operator=(const ShardStore&) = delete;

  // Null: there is none.
  StoredShard* find(const ShardId& id) const;
  // Creates a shard of zeros, or checks that it is there with this dtype and count. With `num_clients` above 0, the
  // client has a clock of the array from now on.
  Status create(const ShardId& id, DataType dtype, uint64_t count, uint64_t num_clients, uint64_t client,
                const RingInfo& ring = RingInfo());
  Status remove(const ShardId& id);
  void tick(uint64_t array, const Ticker& ticker, uint64_t staleness, bool advances);
  // The client is gone, for this array.
  void drop(uint64_t array, uint64_t client);
  // The session is gone.
  void drop(CommandOwner* owner, const ClockClient* waiter);

  // Of shards with copies.

  // The shard that the command of a client is for. As its primary this server carries it out: it becomes that if it has
  // the copy. An error: see Reply.
  Status claim(const Command& command, StoredShard** shard);
  // The shard that the command of a primary is for. An error that is_lost(): another server is the primary.
  Status find_copy(const Command& command, const CommandOwner* primary, StoredShard** shard) const;
  Status begin_copy(const Command& command, const RingInfo& ring, CommandOwner* primary);
  Status adopt(const Command& command, const ClientState* states, StoredShard* shard);
  void drop_copy(const ShardId& id);
  // Another server has become the primary.
  void depose(StoredShard* shard, const Status& why);
  void end_awaiting(StoredShard* shard, const Reply& reply);
  std::vector<StoredShard*> primaries_of(uint64_t ring) const;
  std::vector<ClientState> clients_of(const StoredShard& shard) const;
  // True if there are shards with copies, or have been.
  bool has_rings() const { return has_rings_; }
  // Called often. If this process was paused meanwhile, so long that another server may have become the primary, its
  // copies are removed, and its primaries ask their replicas. Returns true if copies were removed.
  bool check_pause(uint64_t now);

  void set_user_rules(const UserRules& rules) { user_rules_ = rules; }
  const UserRules& user_rules() const { return user_rules_; }
  BufferPool& buffers() { return buffers_; }
  Replicator& replicator() { return replicator_; }

 private:
  void promote(StoredShard* shard);
  Status make(const ShardId& id, DataType dtype, uint64_t count, const RingInfo& ring, StoredShard** made);
  void end_clocks(const ShardId& id, const Status& status);

  std::unordered_map<uint64_t, Clocks> clocks_;  // by array
  UserRules user_rules_;
  BufferPool buffers_;
  std::unordered_map<ShardId, std::unique_ptr<StoredShard>, ShardIdHash> shards_;
  bool has_rings_ = false;
  uint64_t last_check_ = 0;
  Replicator replicator_{this};  // it has memory of the buffers
};

}  // namespace hvl
