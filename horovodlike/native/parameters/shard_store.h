// The shards of a server, the clocks of their arrays, and the rules of the user: for all sessions of its clients.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "parameters/buffer_pool.h"
#include "parameters/clocks.h"
#include "parameters/command.h"
#include "parameters/shard.h"

namespace hvl {

// Not thread-safe.
class ShardStore {
 public:
  ShardStore() = default;
  ShardStore(const ShardStore&) = delete;
  ShardStore& operator=(const ShardStore&) = delete;

  // An error says that there is none.
  Status find(const ShardId& id, Shard** shard) const;
  // Creates a shard of zeros, or checks that it is there with this dtype and count. With `num_clients` above 0, the
  // client has a clock of the array from now on.
  Status create(const ShardId& id, DataType dtype, uint64_t count, uint64_t num_clients, uint64_t client);
  Status remove(const ShardId& id);
  void tick(uint64_t array, const Ticker& ticker, uint64_t staleness);
  // The client has no clock of this array any more.
  void drop(uint64_t array, uint64_t client);
  // Drops the waiter's ticks.
  void forget(const ClockClient* waiter);

  void set_user_rules(const UserRules& rules) { user_rules_ = rules; }
  const UserRules& user_rules() const { return user_rules_; }
  BufferPool& buffers() { return buffers_; }

 private:
  std::unordered_map<uint64_t, Clocks> clocks_;  // by array
  UserRules user_rules_;
  BufferPool buffers_;
  std::unordered_map<ShardId, std::unique_ptr<Shard>, ShardIdHash> shards_;
};

}  // namespace hvl
