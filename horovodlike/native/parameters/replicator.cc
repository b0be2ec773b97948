#include "parameters/replicator.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "parameters/shard_store.h"

namespace hvl {

namespace {

constexpr uint64_t kMostWaitingBytes = uint64_t{64} << 20;  // of changes, for a replica
constexpr uint64_t kMostStates = kPieceBytesMost / sizeof(ClientState);

}  // namespace

Replicator::~Replicator() {
  for (auto& [number, ring] : rings_) {
    for (Forwarded* piece : ring.pending) delete piece;
  }
}

void Replicator::begin(uint64_t number, int64_t server, OnEnd on_end) {
  Ring& ring = rings_[number];
  if (ring.server != 0) stop(number, &ring, Status(HVL_SHUT_DOWN, "the copies are kept at another server from now on"));
  ring.server = server;
  ring.on_end = std::move(on_end);
  for (StoredShard* shard : store_.primaries_of(number)) copy(shard);
}

void Replicator::end_server(int64_t server, const Status& why) {
  for (auto& [number, ring] : rings_) {
    if (ring.server == server) stop(number, &ring, why);
  }
}

void Replicator::stop(uint64_t number, Ring* ring, const Status& why) {
  ring->server = 0;
  for (StoredShard* shard : store_.primaries_of(number)) {
    if (shard->paused_at != 0 && why.is_lost()) {
      store_.depose(shard, Status::lost("this server was paused, and then its replica was lost: " + why.message()));
      continue;
    }
    shard->paused_at = 0;
    shard->copy = CopyState::kNone;
    ++shard->ring.view;
  }
  const std::vector<StoredShard*> shards = store_.primaries_of(number);
  if (!shards.empty() && why.code() != HVL_SHUT_DOWN) {
    log(LogLevel::kWarning, "this parameter server continues without a copy: " + why.message());
  }
  for (CommandOwner* owner : std::exchange(ring->stalled, {})) owner->on_room();
  const OnEnd on_end = std::exchange(ring->on_end, nullptr);
  if (on_end != nullptr) on_end(why);
}

std::unique_ptr<Replicator::Forwarded> Replicator::make(const StoredShard& shard, Command::Kind kind) const {
  auto piece = std::make_unique<Forwarded>();
  piece->ring = shard.ring.ring;
  piece->command.kind = kind;
  piece->command.shard = shard.id;
  return piece;
}

void Replicator::send(Ring* ring, const StoredShard& shard, std::unique_ptr<Forwarded> made) {
  Forwarded* piece = made.release();  // until it has ended
  piece->server = ring->server;
  piece->patience = shard.ring.patience;
  piece->on_end = [this](Piece* ended, const Status& status) { on_piece_end(ended, status); };
  piece->began = now_ns();
  piece->command.is_forwarded = true;
  piece->command.view = static_cast<uint32_t>(shard.ring.view);
  if (piece->memory == nullptr) piece->sent = piece->bytes.data();
  ring->pending.insert(piece);
  ring->num_bytes += piece->num_sent;
  if (!call_(ring->server, piece)) on_piece_end(piece, Status::lost("the connection to the replica has ended"));
}

// All of the shard is copied at once, so that the changes that come meanwhile can follow.
void Replicator::copy(StoredShard* shard) {
  const auto found = rings_.find(shard->ring.ring);
  if (found == rings_.end() || found->second.server == 0) return;
  Ring* ring = &found->second;
  shard->copy = CopyState::kUnderWay;
  auto begin = make(*shard, Command::Kind::kCopy);
  begin->command.dtype = shard->dtype();
  begin->command.range.count = shard->count();
  begin->bytes.resize(sizeof(RingInfo));
  std::memcpy(begin->bytes.data(), &shard->ring, sizeof(RingInfo));
  begin->num_sent = begin->bytes.size();
  send(ring, *shard, std::move(begin));
  if (shard->has_changed) {
    for (const Part part : {Part::kValues, Part::kSlot0, Part::kSlot1, Part::kCounters}) copy_part(ring, *shard, part);
  }
  copy_clients(ring, *shard);
}

void Replicator::copy_part(Ring* ring, const StoredShard& shard, Part part) {
  const uint64_t width = shard.width_of(part), most = kPieceBytesMost / width;
  for (Range range{0, 0}; range.offset < shard.count_of(part); range.offset += range.count) {
    range.count = std::min(most - range.offset % most, shard.count_of(part) - range.offset);
    if (!shard.is_used(part, range)) continue;
    auto piece = make(shard, Command::Kind::kPush);
    piece->command.part = part;
    piece->command.update.rule = Rule::kCopy;
    piece->command.range = range;
    piece->num_sent = range.count * width;
    piece->memory = store_.buffers().take(piece->num_sent);
    piece->sent = piece->memory.get();
    shard.read(part, range, piece->memory.get());
    send(ring, shard, std::move(piece));
  }
}

void Replicator::copy_clients(Ring* ring, const StoredShard& shard) {
  const std::vector<ClientState> states = store_.clients_of(shard);
  for (uint64_t done = 0, count = 0; done == 0 || done < states.size(); done += count) {
    count = std::min<uint64_t>(kMostStates, states.size() - done);
    auto piece = make(shard, Command::Kind::kAdopt);
    piece->command.range = Range{1, count};
    piece->num_sent = count * sizeof(ClientState);
    const char* from = reinterpret_cast<const char*>(states.data() + done);
    piece->bytes.assign(from, from + piece->num_sent);
    if (done + count == states.size()) piece->stage = Forwarded::kEndsCopy;
    send(ring, shard, std::move(piece));
    if (count == 0) break;
  }
}

bool Replicator::forward(StoredShard* shard, const Command& command, const char* payload, uint64_t num_bytes,
                         BufferPool::Pointer memory, CommandOwner* owner, const Reply& reply) {
  if (shard->copy == CopyState::kNone) return false;
  const bool waits = shard->copy == CopyState::kComplete && owner != nullptr;
  auto piece = make(*shard, command.kind);
  piece->command = command;
  piece->num_sent = num_bytes;
  if (memory == nullptr && piece->is_large()) {
    memory = store_.buffers().take(num_bytes);
    std::memcpy(memory.get(), payload, num_bytes);
    payload = memory.get();
  }
  if (memory != nullptr) {
    piece->memory = std::move(memory);
    piece->sent = payload;
  } else {
    piece->bytes.assign(payload, payload + num_bytes);
  }
  piece->owner = waits ? owner : nullptr;
  piece->reply = reply;
  send(&rings_.at(shard->ring.ring), *shard, std::move(piece));
  return waits;
}

bool Replicator::settle(StoredShard* shard, CommandOwner* owner, const Reply& reply) {
  if (shard->copy != CopyState::kComplete) return false;
  auto piece = make(*shard, Command::Kind::kAsk);  // the replica may have become the primary
  piece->owner = owner;
  piece->reply = reply;
  send(&rings_.at(shard->ring.ring), *shard, std::move(piece));
  return true;
}

void Replicator::await(StoredShard* shard, CommandOwner* owner, uint64_t number) {
  shard->awaiting.emplace_back(owner, number);
  if (shard->copy == CopyState::kComplete) confirm(shard);
}

// Changes that were acknowledged before the copy was complete are at the replica when it gets this.
void Replicator::confirm(StoredShard* shard) {
  auto piece = make(*shard, Command::Kind::kAdopt);
  piece->stage = Forwarded::kConfirmsCopy;
  send(&rings_.at(shard->ring.ring), *shard, std::move(piece));
}

bool Replicator::has_room_for(const StoredShard& shard, CommandOwner* owner) {
  if (shard.copy == CopyState::kNone) return true;
  Ring& ring = rings_.at(shard.ring.ring);
  if (ring.num_bytes < kMostWaitingBytes) return true;
  ring.stalled.insert(owner);
  return false;
}

void Replicator::refuse(const StoredShard& shard, const Status& why) {
  const auto found = rings_.find(shard.ring.ring);
  if (found == rings_.end()) return;
  for (Forwarded* piece : found->second.pending) {
    if (piece->command.shard == shard.id) piece->reply.status = why;
  }
}

void Replicator::require_answer(StoredShard* shard, uint64_t now) {
  if (shard->copy != CopyState::kComplete) return;
  shard->paused_at = now;
  send(&rings_.at(shard->ring.ring), *shard, make(*shard, Command::Kind::kAsk));
}

void Replicator::drop(CommandOwner* owner) {
  for (auto& [number, ring] : rings_) {
    for (Forwarded* piece : ring.pending) {
      if (piece->owner == owner) piece->owner = nullptr;
    }
    ring.stalled.erase(owner);
  }
}

void Replicator::keep_alive(uint64_t now) {
  for (auto& [number, ring] : rings_) {
    if (ring.server == 0 || !ring.pending.empty()) continue;
    for (const StoredShard* shard : store_.primaries_of(number)) {
      if (ring.server == 0 || now - ring.last_answer < shard->ring.patience / 4) break;
      send(&ring, *shard, make(*shard, Command::Kind::kAsk));
    }
  }
}

void Replicator::on_piece_end(Piece* ended, const Status& status) {
  const std::unique_ptr<Forwarded> piece(static_cast<Forwarded*>(ended));
  Ring& ring = rings_.at(piece->ring);
  ring.pending.erase(piece.get());
  ring.num_bytes -= piece->num_sent;
  StoredShard* shard = store_.find(piece->command.shard);
  const bool is_ours = shard != nullptr && shard->role == Role::kPrimary && shard->ring.view == piece->command.view;
  if (status.ok()) {
    ring.last_answer = std::max(ring.last_answer, piece->began);
    if (is_ours && piece->began > shard->paused_at) shard->paused_at = 0;
    if (is_ours && piece->stage == Forwarded::kEndsCopy) {
      shard->copy = CopyState::kComplete;
      confirm(shard);
    } else if (is_ours && piece->stage == Forwarded::kConfirmsCopy) {
      const Reply done{0, Status(), static_cast<uint32_t>(shard->ring.view)};
      store_.end_awaiting(shard, done);
    }
  } else if (piece->is_answered && status.is_lost()) {
    piece->reply.status = status;
    if (is_ours) store_.depose(shard, status);
  } else if (ring.server == piece->server) {
    stop(piece->ring, &ring, status);
  }
  if (is_ours && store_.find(piece->command.shard) == nullptr) piece->reply.status = status;  // it is released
  if (piece->owner != nullptr) piece->owner->on_settled(piece->reply);
  if (ring.num_bytes < kMostWaitingBytes) {
    for (CommandOwner* owner : std::exchange(ring.stalled, {})) owner->on_room();
  }
  if (ring.pending.empty() && ring.is_removed) end_removed(piece->ring, &ring);
}

void Replicator::on_removed(uint64_t number) {
  const auto found = rings_.find(number);
  if (found == rings_.end() || !store_.primaries_of(number).empty()) return;
  found->second.is_removed = true;
  if (found->second.pending.empty()) end_removed(number, &found->second);
}

void Replicator::end_removed(uint64_t number, Ring* ring) {
  if (!store_.primaries_of(number).empty()) {
    ring->is_removed = false;
    return;
  }
  ring->server = 0;
  const OnEnd on_end = std::exchange(ring->on_end, nullptr);
  if (on_end != nullptr) on_end(Status());
}

}  // namespace hvl
