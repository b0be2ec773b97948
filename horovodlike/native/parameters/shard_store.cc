#include "parameters/shard_store.h"

#include <unistd.h>

#include <exception>

namespace hvl {

namespace {

std::string describe(DataType dtype, uint64_t count) {
  return std::to_string(count) + " elements of " + kDataTypeNames[dtype];
}

uint64_t memory_of_host() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Shard* ShardStore::find(const ShardId& id) const {
  const auto found = shards_.find(id);
  return found != shards_.end() ? found->second.get() : nullptr;
}

Status ShardStore::create(const ShardId& id, DataType dtype, uint64_t count, uint64_t num_clients,
                          ClockClient* client) {
  const Shard* shard = find(id);
  if (shard != nullptr && (shard->dtype() != dtype || shard->count() != count)) {
    return Status(HVL_MISMATCH, "a shard of " + describe(dtype, count) + " cannot be created: there is one of " +
                                    describe(shard->dtype(), shard->count()) + " already");
  }
  if (num_clients > 0) {
    Clocks& clocks = clocks_.try_emplace(id.array, num_clients).first->second;
    if (clocks.expected() != num_clients) {
      return Status(HVL_MISMATCH, "an array for " + std::to_string(num_clients) +
                                      " clients cannot be created: there is one for " +
                                      std::to_string(clocks.expected()) + " already");
    }
    clocks.add(client);
  }
  if (shard != nullptr) return Status();
  if (count > memory_of_host() / size_of(dtype)) {
    return Status(HVL_RESOURCES, "a shard of " + describe(dtype, count) + " does not fit into the memory of this host");
  }
  try {
    shards_[id] = std::make_unique<Shard>(dtype, count);
  } catch (const std::exception&) {
    shards_.erase(id);
    return Status(HVL_RESOURCES, "no memory for a shard of " + describe(dtype, count));
  }
  return Status();
}

Status ShardStore::remove(const ShardId& id) {
  const auto clocks = clocks_.find(id.array);
  if (id.index == 0 && clocks != clocks_.end()) {
    clocks->second.fail(Status(HVL_INVALID_ARGUMENT, "the array has been removed"));
    clocks_.erase(clocks);
  }
  if (shards_.erase(id) > 0) return Status();
  return Status(HVL_INVALID_ARGUMENT, "there is no such shard: it has not been created, or it has been removed");
}

void ShardStore::tick(uint64_t array, ClockClient* client, uint64_t number, uint64_t staleness) {
  const auto found = clocks_.find(array);
  if (found != clocks_.end()) return found->second.tick(client, number, staleness);
  client->on_ticked(number, Status(HVL_INVALID_ARGUMENT, "the array has no clocks, or has been removed"));
}

void ShardStore::drop(ClockClient* client) {
  for (auto& [array, clocks] : clocks_) clocks.remove(client);
}

}  // namespace hvl
