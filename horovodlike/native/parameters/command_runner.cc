#include "parameters/command_runner.h"

#include <cstring>
#include <string>

#include "base/clock.h"
#include "parameters/turns.h"

namespace hvl {

namespace {

bool has_elements(const Command& command) {
  if (command.kind == Command::Kind::kAdopt) return true;
  return command.kind == Command::Kind::kPush && (command.part != Part::kValues || has_payload(command.update.rule));
}

Status read_ring(const char* bytes, uint64_t num_bytes, RingInfo* ring) {
  if (num_bytes == sizeof *ring) std::memcpy(ring, bytes, sizeof *ring);
  const bool is_valid = num_bytes == sizeof *ring && ring->ring != 0 && ring->patience >= kLeastPatience &&
                        ring->patience <= kMostPatience && ring->view >= 1 && ring->view < INT32_MAX;
  return is_valid ? Status() : Status(HVL_INVALID_ARGUMENT, "the description of the ring of a shard is not valid");
}

Status check_dtype(const Command& command, const Shard& shard) {
  if (is_of_counts(command.part) || command.dtype == shard.dtype()) return Status();
  return Status(HVL_MISMATCH, std::string("the array has elements of ") + name_of(command.dtype) +
                                  ", and the shard has elements of " + name_of(shard.dtype()));
}

// Ends the clocks of clients of arrays.
void end_clocks(std::set<std::pair<uint64_t, uint64_t>>* joined, ShardStore* store) {
  for (const auto& [array, client] : std::exchange(*joined, {})) store->drop(array, client);
}

}  // namespace

CommandRunner::~CommandRunner() {
  end_clocks(&joined_, &store_);
  store_.drop(this, this);
}

bool CommandRunner::has_large_payload(const Command& command) {
  return command.num_inline == 0 && (command.num_ranges > 0 || has_elements(command)) && command.range.count > 0;
}

bool CommandRunner::has_room_for(const Command& command) {
  const bool is_change = command.kind == Command::Kind::kPush && !command.is_forwarded;
  const StoredShard* shard = is_change && store_.has_rings() ? store_.find(command.shard) : nullptr;
  return shard == nullptr || store_.replicator().has_room_for(*shard, this);
}

void CommandRunner::on_ticked(uint64_t number, const Status& status) {
  const auto tick = unanswered_.find(number);
  StoredShard* shard = tick != unanswered_.end() ? store_.find(tick->second.shard) : nullptr;
  const Reply ticked{number, status, shard != nullptr ? static_cast<uint32_t>(shard->ring.view) : 0};
  if (status.ok() && shard != nullptr && store_.replicator().settle(shard, this, ticked)) return;
  reply(ticked);
  output_.notify();
}

void CommandRunner::on_settled(const Reply& settled) {
  const auto pulled = pulled_.find(settled.number);
  if (pulled != pulled_.end() && settled.status.ok()) {
    return_pulled(settled.number);
  } else {
    if (pulled != pulled_.end()) pulled_.erase(pulled);
    reply(settled);
  }
  output_.notify();
}

void CommandRunner::reply(const Reply& reply) {
  const auto answered = unanswered_.extract(reply.number);
  if (!answered.empty() && reply.status.is_lost()) refused_.insert(answered.mapped());
  output_.reply(reply);
}

void CommandRunner::return_pulled(uint64_t number) {
  unanswered_.erase(number);
  Pulled pulled = std::move(pulled_.extract(number).mapped());
  output_.return_elements(number, std::move(pulled.memory), pulled.num_bytes);
}

Reply CommandRunner::reply_to(const Running& running, const Status& status) const {
  const bool has_copy = store_.has_rings() && running.shard != nullptr && running.shard->role != Role::kIncomplete;
  return Reply{running.command.number, status, has_copy ? static_cast<uint32_t>(running.shard->ring.view) : 0};
}

void CommandRunner::carry_out(const Command& command, const Pushed& payload, BufferPool::Pointer memory) {
  Running made{command, payload, std::move(memory)};
  Running* running = &made;
  const Status status = command.is_forwarded ? run_forwarded(running) : run_direct(running);
  if (store_.has_rings()) running->shard = store_.find(running->command.shard);  // it may be another one, or gone
  if (running->replies || !status.ok()) reply(reply_to(*running, status));
}

Status CommandRunner::run_direct(Running* running) {
  using Kind = Command::Kind;
  const Command& command = running->command;
  if (has_left_) {  // the client waits for nothing
    running->replies = false;
    return Status();
  }
  if (command.view > 0) {
    const ClientShard from{command.client, command.shard};
    unanswered_.emplace(command.number, from);
    if (command.resumes) refused_.erase(from);
    if (refused_.count(from) > 0) return Status::lost("a command before this one was refused");
  }
  switch (command.kind) {
    case Kind::kCreate: return create(running);
    case Kind::kJoin: joined_.emplace(command.shard.array, command.client); return Status();
    case Kind::kAsk: return Status();
    case Kind::kLeave:
      has_left_ = true;
      running->replies = false;
      end_clocks(&joined_, &store_);
      return Status();
    case Kind::kCopy:
    case Kind::kAdopt: return Status(HVL_INVALID_ARGUMENT, "only servers send copies");
    case Kind::kPush:
    case Kind::kPull:
    case Kind::kRemove:
    case Kind::kTick:
    case Kind::kAwait: break;
  }
  const Status status = store_.claim(command, &running->shard);
  return status.ok() ? run_of_shard(running) : status;
}

Status CommandRunner::run_of_shard(Running* running) {
  using Kind = Command::Kind;
  const Command& command = running->command;
  if (Turns::takes_turn(command)) running->shard->front = command.range.offset + command.range.count;
  if (command.kind == Kind::kPull) return pull(running);
  if (command.kind == Kind::kPush) return push(running);
  if (command.kind == Kind::kRemove) return remove(running);
  if (command.kind == Kind::kTick) {
    tick(running);
  } else if (running->shard->ring.ring != 0) {
    running->replies = false;
    store_.replicator().await(running->shard, this, command.number);
  }
  return Status();
}

Status CommandRunner::create(Running* running) {
  const Command& command = running->command;
  RingInfo ring;
  Status status;
  if (command.num_inline > 0) status = read_ring(running->payload.bytes, running->payload.num_bytes, &ring);
  running->shard = store_.find(command.shard);
  if (status.ok() && running->shard != nullptr && running->shard->role != Role::kPrimary) {
    status = Status::lost("this server has a copy of the shard only");
  }
  if (!status.ok()) return status;
  const uint64_t num_clients = command.range.offset;
  status = store_.create(command.shard, command.dtype, command.range.count, num_clients, command.client, ring);
  if (!status.ok()) return status;
  if (num_clients > 0) joined_.emplace(command.shard.array, command.client);
  running->shard = store_.find(command.shard);
  Command forwarded = command;
  forwarded.num_inline = 0;
  forward(running, forwarded, Pushed(), this, Status());
  return Status();
}

Status CommandRunner::remove(Running* running) {
  forward(running, running->command, Pushed(), this, Status());
  return store_.remove(running->command.shard);
}

void CommandRunner::tick(Running* running) {
  const Command& command = running->command;
  running->replies = false;
  if (running->shard->ring.ring != 0) joined_.emplace(command.shard.array, command.client);
  const bool advances = running->shard->is_new(command);
  if (advances) {
    running->shard->mark(command);
    store_.replicator().forward(running->shard, command, nullptr, 0, {}, nullptr, Reply());
  }
  store_.tick(command.shard.array, Ticker{command.client, this, command.number}, command.range.offset, advances);
}

void CommandRunner::forward(Running* running, const Command& command, Pushed payload, CommandOwner* owner,
                            const Status& status) {
  running->replies = !store_.replicator().forward(running->shard, command, payload.bytes, payload.num_bytes,
                                                  std::move(running->memory), owner, reply_to(*running, status));
}

Status CommandRunner::run_forwarded(Running* running) {
  using Kind = Command::Kind;
  const Command& command = running->command;
  last_forwarded = now_ns();
  if (command.kind == Kind::kCopy) {
    RingInfo ring;
    const Status status = read_ring(running->payload.bytes, running->payload.num_bytes, &ring);
    return status.ok() ? store_.begin_copy(command, ring, this) : status;
  }
  Status status = store_.find_copy(command, this, &running->shard);
  if (!status.ok()) return status;
  status = change_copy(running);
  if (!status.ok()) store_.drop_copy(command.shard);  // it differs now
  return status;
}

Status CommandRunner::change_copy(Running* running) {
  using Kind = Command::Kind;
  const Command& command = running->command;
  StoredShard* shard = running->shard;
  if (command.kind == Kind::kAsk) return Status();
  if (command.kind == Kind::kRemove) return store_.remove(command.shard);
  if (command.kind == Kind::kCreate) {
    return store_.create(command.shard, command.dtype, command.range.count, command.range.offset, command.client);
  }
  if (command.kind == Kind::kAdopt) {
    const bool fits = command.range.count * sizeof(ClientState) == running->payload.num_bytes;
    if (!fits) return Status(HVL_INVALID_ARGUMENT, "the clients of a copy are cut off");
    std::vector<ClientState> states(command.range.count);
    if (!states.empty()) std::memcpy(states.data(), running->payload.bytes, running->payload.num_bytes);
    return store_.adopt(command, states.data(), shard);
  }
  if (!shard->is_new(command)) return Status();
  shard->mark(command);
  if (command.kind == Kind::kTick) {
    store_.tick(command.shard.array, Ticker{command.client}, command.range.offset, true);
    return Status();
  }
  if (command.kind != Kind::kPush) return Status(HVL_INVALID_ARGUMENT, "a command that is no change of a copy");
  const Status status = take_ranges(command, *shard, &running->payload);
  return status.ok() ? apply(command, shard, running->payload) : status;
}

Status CommandRunner::take_ranges(const Command& command, const Shard& shard, Pushed* payload) {
  ranges_.assign(1, command.range);
  if (command.num_ranges > 0) {
    const uint64_t num_bytes = command.num_ranges * sizeof(Range);
    if (payload->num_bytes < num_bytes) return Status(HVL_INVALID_ARGUMENT, "the ranges of a command are cut off");
    ranges_.resize(command.num_ranges);
    std::memcpy(ranges_.data(), payload->bytes, num_bytes);
    payload->bytes += num_bytes;
    payload->num_bytes -= num_bytes;
  }
  uint64_t count = 0;
  for (const Range& range : ranges_) {
    const Status status = shard.check_range(range, command.part);
    if (!status.ok()) return status;
    const bool fits = command.num_ranges == 0 || range.count <= kPieceBytesMost;  // the sum does not overflow, either
    if (!fits) return Status(HVL_INVALID_ARGUMENT, "a range of a command has more elements than a piece may have");
    count += range.count;
  }
  if (count == command.range.count) return Status();
  return Status(HVL_INVALID_ARGUMENT, "the ranges of a command have another number of elements than it says");
}

Status CommandRunner::push(Running* running) {
  const Command& command = running->command;
  StoredShard* shard = running->shard;
  if (!shard->is_new(command)) {
    running->replies = !store_.replicator().settle(shard, this, reply_to(*running));
    return Status();
  }
  Pushed elements = running->payload;
  Status status = check_dtype(command, *shard);
  if (status.ok()) status = take_ranges(command, *shard, &elements);
  if (status.ok()) status = apply(command, shard, elements);
  const bool is_named = command.part == Part::kValues && command.update.rule == Rule::kNamed;
  if (!status.ok() && !is_named) return status;
  shard->has_changed = true;
  shard->mark(command);
  if (shard->copy == CopyState::kNone) return status;
  is_named ? forward_values(running, status) : forward(running, command, running->payload, this, status);
  return running->replies ? status : Status();
}

Status CommandRunner::apply(const Command& command, Shard* shard, Pushed elements) {
  const uint64_t count = has_elements(command) ? command.range.count : 0, width = shard->width_of(command.part);
  const bool is_converted = command.format != HVL_PAYLOAD_FULL;
  const bool can_convert = shard->dtype() == HVL_FLOAT32 || shard->dtype() == HVL_FLOAT64;
  if (is_converted && (!can_convert || command.part != Part::kValues)) {
    return Status(HVL_INVALID_ARGUMENT, "only values of float32 and float64 are sent as numbers of fewer bits");
  }
  const uint64_t expected = is_converted ? num_bytes_of(command.format, shard->dtype(), count) : count * width;
  if (elements.num_bytes != expected) {
    return Status(HVL_MISMATCH, std::to_string(elements.num_bytes) + " bytes were pushed for " + std::to_string(count) +
                                    " elements of " + name_of(shard->dtype()));
  }
  BufferPool::Pointer widened;
  if (is_converted) {
    widened = store_.buffers().take(count * width);
    widen(command.format, shard->dtype(), elements.bytes, count, widened.get());
    elements.bytes = widened.get();
  }
  const char* bytes = has_elements(command) ? elements.bytes : nullptr;
  if (command.part == Part::kValues) {
    return shard->apply(command.update, ranges_, bytes, store_.user_rules());
  }
  for (const Range& range : ranges_) {
    shard->write(command.part, range, bytes);
    bytes += range.count * width;
  }
  return Status();
}

// A rule of the user may give other values at the other server, and one that has failed may have changed some.
void CommandRunner::forward_values(Running* running, const Status& status) {
  Command command = running->command;
  const uint64_t width = running->shard->width_of(Part::kValues);
  const uint64_t in_front = command.num_ranges * sizeof(Range), num_bytes = in_front + command.range.count * width;
  BufferPool::Pointer memory = store_.buffers().take(num_bytes);
  std::memcpy(memory.get(), ranges_.data(), in_front);
  char* to = memory.get() + in_front;
  for (const Range& range : ranges_) {
    running->shard->read(Part::kValues, range, to);
    to += range.count * width;
  }
  command.update = Update{Rule::kCopy, {}};
  command.format = HVL_PAYLOAD_FULL;
  const Pushed payload{memory.get(), num_bytes};
  running->memory = std::move(memory);
  forward(running, command, payload, this, status);
}

// The elements are copied, since later pushes may change them before they are sent.
Status CommandRunner::pull(Running* running) {
  const Command& command = running->command;
  const StoredShard& shard = *running->shard;
  Pushed ranges = running->payload;
  Status status = check_dtype(command, shard);
  if (status.ok()) status = take_ranges(command, shard, &ranges);
  if (!status.ok()) return status;
  const uint64_t width = shard.width_of(command.part);
  if (command.range.count > kPieceBytesMost / width) {
    return Status(HVL_INVALID_ARGUMENT, "more elements are asked for than a piece may have");
  }
  Pulled pulled{nullptr, command.range.count * width};
  const bool is_plain = command.address != 0 && command.part == Part::kValues && command.num_ranges == 0;
  const char* values = shard.values() + ranges_.front().offset * width;
  if (!is_plain || !output_.copy_to_client(command, values, pulled.num_bytes)) {
    pulled.memory = output_.memory_for(command.number, pulled.num_bytes);
    char* to = pulled.memory.get();
    for (const Range& range : ranges_) {
      shard.read(command.part, range, to);
      to += range.count * width;
    }
  }
  running->replies = false;
  pulled_[command.number] = std::move(pulled);
  if (!store_.replicator().settle(running->shard, this, reply_to(*running))) return_pulled(command.number);
  return Status();
}

}  // namespace hvl
