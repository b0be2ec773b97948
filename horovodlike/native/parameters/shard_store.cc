#include "parameters/shard_store.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "base/clock.h"
#include "base/log.h"

namespace hvl {

namespace {

constexpr const char* kNoShard = "there is no such shard: it has not been created, or it has been removed";

std::string describe(DataType dtype, uint64_t count) {
  return std::to_string(count) + " elements of " + kDataTypeNames[dtype];
}

std::string name_of(const ShardId& id) {
  return "shard " + std::to_string(id.index) + " of array " + std::to_string(id.array);
}

uint64_t memory_of_host() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

StoredShard* ShardStore::find(const ShardId& id) const {
  const auto found = shards_.find(id);
  return found != shards_.end() ? found->second.get() : nullptr;
}

Status ShardStore::make(const ShardId& id, DataType dtype, uint64_t count, const RingInfo& ring, StoredShard** made) {
  if (count > memory_of_host() / size_of(dtype)) {
    return Status(HVL_RESOURCES, "a shard of " + describe(dtype, count) + " does not fit into the memory of this host");
  }
  try {
    *made = (shards_[id] = std::make_unique<StoredShard>(id, dtype, count)).get();
  } catch (const std::exception&) {
    shards_.erase(id);
    return Status(HVL_RESOURCES, "no memory for a shard of " + describe(dtype, count));
  }
  (*made)->ring = ring;
  has_rings_ = has_rings_ || ring.ring != 0;
  return Status();
}

Status ShardStore::create(const ShardId& id, DataType dtype, uint64_t count, uint64_t num_clients, uint64_t client,
                          const RingInfo& ring) {
  StoredShard* shard = find(id);
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
  const Status status = make(id, dtype, count, ring, &shard);
  if (status.ok() && ring.ring != 0) replicator_.copy(shard);
  return status;
}

void ShardStore::end_clocks(const ShardId& id, const Status& status) {
  const auto clocks = clocks_.find(id.array);
  if (id.index != 0 || clocks == clocks_.end()) return;
  Clocks ended = std::move(clocks->second);
  clocks_.erase(clocks);
  ended.fail(status);
}

Status ShardStore::remove(const ShardId& id) {
  const std::string why = "the array has been removed";
  end_clocks(id, Status(HVL_INVALID_ARGUMENT, why));
  StoredShard* shard = find(id);
  if (shard == nullptr) return Status(HVL_INVALID_ARGUMENT, kNoShard);
  end_awaiting(shard, Reply{0, Status(HVL_INVALID_ARGUMENT, why)});
  const uint64_t ring = shard->role == Role::kPrimary ? shard->ring.ring : 0;
  shards_.erase(id);
  if (ring != 0) replicator_.on_removed(ring);
  return Status();
}

void ShardStore::tick(uint64_t array, const Ticker& ticker, uint64_t staleness, bool advances) {
  const auto found = clocks_.find(array);
  if (found != clocks_.end()) return found->second.tick(ticker, staleness, advances);
  if (ticker.waiter == nullptr) return;
  ticker.waiter->on_ticked(ticker.number, Status(HVL_INVALID_ARGUMENT, "the array has no clocks, or has been removed"));
}

void ShardStore::drop(uint64_t array, uint64_t client) {
  const auto found = clocks_.find(array);
  if (found != clocks_.end()) found->second.remove(client);
}

void ShardStore::drop(CommandOwner* owner, const ClockClient* waiter) {
  replicator_.drop(owner);
  for (auto& [array, clocks] : clocks_) clocks.forget(waiter);
  for (auto it = shards_.begin(); it != shards_.end();) {
    StoredShard& shard = *it->second;
    auto& awaiting = shard.awaiting;
    const auto is_its = [&](const auto& each) { return each.first == owner; };
    awaiting.erase(std::remove_if(awaiting.begin(), awaiting.end(), is_its), awaiting.end());
    const bool was_source = shard.source == owner;
    if (was_source) shard.source = nullptr;
    it = was_source && shard.role == Role::kIncomplete ? shards_.erase(it) : std::next(it);
  }
}

Status ShardStore::claim(const Command& command, StoredShard** claimed) {
  StoredShard* shard = find(command.shard);
  const bool is_there = shard != nullptr && shard->role != Role::kIncomplete &&
                        (shard->ring.ring == 0 || command.view <= shard->ring.view);
  if (!is_there) return command.view == 0 ? Status(HVL_INVALID_ARGUMENT, kNoShard) : Status::lost(kNoShard);
  if (shard->role == Role::kReplica) {
    const uint64_t now = now_ns();
    if (check_pause(now)) return Status::lost(kNoShard);
    const bool has_primary =
        shard->source != nullptr && now - shard->source->last_forwarded < shard->ring.patience / 4 * 3;
    if (has_primary && !command.insists) return Status::lost("this server has a copy of the shard only");
    promote(shard);
  }
  *claimed = shard;
  return Status();
}

void ShardStore::promote(StoredShard* shard) {
  shard->role = Role::kPrimary;
  shard->source = nullptr;
  ++shard->ring.view;
  log(LogLevel::kWarning, "this parameter server continues with the copy of " + name_of(shard->id) +
                              ": a client has lost the server that had it");
  replicator_.copy(shard);
}

Status ShardStore::find_copy(const Command& command, const CommandOwner* primary, StoredShard** found) const {
  StoredShard* shard = find(command.shard);
  if (shard != nullptr && (shard->role == Role::kPrimary || shard->ring.view > command.view)) {
    return Status::lost("another server has become the primary of " + name_of(command.shard));
  }
  if (shard == nullptr || shard->source != primary) {
    return Status(HVL_INVALID_ARGUMENT, "there is no copy of " + name_of(command.shard));
  }
  *found = shard;
  return Status();
}

Status ShardStore::begin_copy(const Command& command, const RingInfo& ring, CommandOwner* primary) {
  StoredShard* shard = find(command.shard);
  const bool is_again = shard != nullptr && shard->source == primary;
  if (shard != nullptr && ring.view <= shard->ring.view && !is_again) {
    return Status::lost("another server has become the primary of " + name_of(command.shard));
  }
  if (shard != nullptr && shard->role == Role::kPrimary) {
    depose(shard, Status::lost("another server has become the primary of " + name_of(command.shard)));
  } else if (shard != nullptr) {
    drop_copy(command.shard);
  }
  const Status status = make(command.shard, command.dtype, command.range.count, ring, &shard);
  if (!status.ok()) return status;
  shard->role = Role::kIncomplete;
  shard->source = primary;
  shard->has_changed = true;
  return Status();
}

Status ShardStore::adopt(const Command& command, const ClientState* states, StoredShard* shard) {
  for (uint64_t index = 0; index < command.range.count; ++index) {
    const ClientState& state = states[index];
    if (state.client == 0) {
      clocks_.erase(shard->id.array);
      clocks_.try_emplace(shard->id.array, state.mark).first->second.set_num_live(state.clock);
      continue;
    }
    if (state.mark > 0) shard->marks[state.client] = state.mark;
    const auto clocks = clocks_.find(shard->id.array);
    if (state.clock == ClientState::kNoClock || shard->id.index != 0) continue;
    if (clocks == clocks_.end()) return Status(HVL_INVALID_ARGUMENT, "a copy has a clock of an array without clocks");
    clocks->second.set(state.client, state.clock);
  }
  if (command.range.offset == 0) shard->role = Role::kReplica;
  return Status();
}

std::vector<ClientState> ShardStore::clients_of(const StoredShard& shard) const {
  std::vector<ClientState> states;
  const auto clocks = clocks_.find(shard.id.array);
  const bool has_clocks = shard.id.index == 0 && clocks != clocks_.end();
  if (has_clocks) states.push_back(ClientState{0, clocks->second.expected(), clocks->second.num_live()});
  for (const auto& [client, mark] : shard.marks) states.push_back(ClientState{client, mark});
  if (!has_clocks) return states;
  for (const auto& [client, clock] : clocks->second.all()) states.push_back(ClientState{client, 0, clock});
  return states;
}

void ShardStore::drop_copy(const ShardId& id) {
  end_clocks(id, Status::lost("the copy has been removed"));
  shards_.erase(id);
}

void ShardStore::depose(StoredShard* shard, const Status& why) {
  log(LogLevel::kWarning, "this parameter server releases " + name_of(shard->id) + ": " + why.message());
  replicator_.refuse(*shard, why);
  end_clocks(shard->id, why);
  end_awaiting(shard, Reply{0, why});
  shards_.erase(ShardId(shard->id));
}

void ShardStore::end_awaiting(StoredShard* shard, const Reply& reply) {
  for (const auto& [owner, number] : std::exchange(shard->awaiting, {})) {
    owner->on_settled(Reply{number, reply.status, reply.view});
  }
}

std::vector<StoredShard*> ShardStore::primaries_of(uint64_t ring) const {
  std::vector<StoredShard*> found;
  for (const auto& [id, shard] : shards_) {
    if (shard->ring.ring == ring && shard->role == Role::kPrimary) found.push_back(shard.get());
  }
  return found;
}

bool ShardStore::check_pause(uint64_t now) {
  const uint64_t pause = last_check_ == 0 ? 0 : now - last_check_;
  last_check_ = now;
  if (pause < kPause) return false;
  std::vector<ShardId> primaries, old;
  for (const auto& [id, shard] : shards_) {
    if (shard->source != nullptr) shard->source->last_forwarded = now;  // it may have sent something meanwhile
    const bool is_primary = shard->role == Role::kPrimary;
    if (is_primary && pause >= shard->ring.patience / 8 * 3) primaries.push_back(id);
    if (!is_primary && pause >= shard->ring.patience / 2) old.push_back(id);
  }
  for (const ShardId& id : primaries) {
    if (StoredShard* shard = find(id); shard != nullptr) replicator_.require_answer(shard, now);
  }
  for (const ShardId& id : old) {
    log(LogLevel::kWarning, "this parameter server was paused for " + std::to_string(pause / kMillisecond) +
                                " ms: it removes its copy of " + name_of(id));
    drop_copy(id);
  }
  return !old.empty();
}

}  // namespace hvl
