#include "parameters/shard_store.h"

#include <unistd.h>

#include <exception>
#include <string>
#include <utility>

namespace hvl {

namespace {

std::string describe(DataType dtype, uint64_t count) {
  return std::to_string(count) + " elements of " + kDataTypeNames[dtype];
}

Status no_shard() {
  return Status(HVL_INVALID_ARGUMENT, "there is no such shard: it has not been created, or it has been removed");
}

uint64_t memory_of_host() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

Status ShardStore::find(const ShardId& id, Shard** shard) const {
  const auto found = shards_.find(id);
  if (found == shards_.end()) return no_shard();
  *shard = found->second.get();
  return Status();
}

Status ShardStore::create(const ShardId& id, DataType dtype, uint64_t count, uint64_t num_clients, uint64_t client) {
  const auto found = shards_.find(id);
  const bool exists = found != shards_.end();
  if (exists && (found->second->dtype() != dtype || found->second->count() != count)) {
    return Status(HVL_MISMATCH, "a shard of " + describe(dtype, count) + " cannot be created: there is one of " +
                                    describe(found->second->dtype(), found->second->count()) + " already");
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
  if (exists) return Status();
  if (count > memory_of_host() / size_of(dtype)) {
    return Status(HVL_RESOURCES, "a shard of " + describe(dtype, count) + " does not fit into the memory of this host");
  }
  try {
    shards_.emplace(id, std::make_unique<Shard>(dtype, count));
  } catch (const std::exception&) {
    return Status(HVL_RESOURCES, "no memory for a shard of " + describe(dtype, count));
  }
  return Status();
}

Status ShardStore::remove(const ShardId& id) {
  const auto clocks = clocks_.find(id.array);
  if (id.index == 0 && clocks != clocks_.end()) {
    Clocks ended = std::move(clocks->second);
    clocks_.erase(clocks);
    ended.fail(Status(HVL_INVALID_ARGUMENT, "the array has been removed"));
  }
  return shards_.erase(id) > 0 ? Status() : no_shard();
}

void ShardStore::tick(uint64_t array, const Ticker& ticker, uint64_t staleness) {
  const auto found = clocks_.find(array);
  if (found != clocks_.end()) return found->second.tick(ticker, staleness);
  ticker.waiter->on_ticked(ticker.number, Status(HVL_INVALID_ARGUMENT, "the array has no clocks, or has been removed"));
}

void ShardStore::drop(uint64_t array, uint64_t client) {
  const auto found = clocks_.find(array);
  if (found != clocks_.end()) found->second.remove(client);
}

void ShardStore::forget(const ClockClient* waiter) {
  for (auto& [array, clocks] : clocks_) clocks.forget(waiter);
}

}  // namespace hvl
