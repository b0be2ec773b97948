// The copies of shards at a second server. The primary of a shard carries out the commands of clients, and sends each
// change on to the replica, in the order in which it has carried them out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "parameters/buffer_pool.h"
#include "parameters/client_session.h"
#include "parameters/stored_shard.h"

namespace hvl {

class ShardStore;

// For the node's thread: the primaries' side.
class Replicator {
 public:
  // Sends a command to a server; false: there is no connection to it.
  using Call = std::function<bool(int64_t server, Piece* piece)>;
  // Called when the copies of a ring have ended at a server.
  using OnEnd = std::function<void(const Status& why)>;

  // `store` must live longer.
  explicit Replicator(ShardStore* store) : store_(*store) {}
  ~Replicator();
  Replicator(const Replicator&) = delete;
  Replicator& operator=(const Replicator&) = delete;

  void set_call(Call call) { call_ = std::move(call); }
  // From now on the shards of a ring, of which this server is the primary, have copies at another server.
  void begin(uint64_t ring, int64_t server, OnEnd on_end);
  // The connection to the server has ended.
  void end_server(int64_t server, const Status& why);

  // Makes a copy, if the ring has a server for it.
  void copy(StoredShard* shard);
  // Sends a change on. False: the caller replies at once; else the owner gets the reply later. `memory`: of the
  // payload, and is taken; without it the payload is copied.
  bool forward(StoredShard* shard, const Command& command, const char* payload, uint64_t num_bytes,
               BufferPool::Pointer memory, CommandOwner* owner, const Reply& reply);
  // As forward(), without a change: the reply comes after those to the changes before.
  bool settle(StoredShard* shard, CommandOwner* owner, const Reply& reply);
  // Replies when the shard has a copy.
  void await(StoredShard* shard, CommandOwner* owner, uint64_t number);
  // False: too much waits for the replica; on_room() of the owner is called when there is room.
  bool has_room_for(const StoredShard& shard, CommandOwner* owner);
  // Another server is the primary of the shard: the replies that wait for the replica become this error.
  void refuse(const StoredShard& shard, const Status& why);
  void drop(CommandOwner* owner);
  // This process was paused, so that the replica may be the primary by now. If it is lost before it has answered, this
  // server releases the shard.
  void require_answer(StoredShard* shard, uint64_t now);
  // Asks the replicas from which nothing has come for some time. Called now and then.
  void keep_alive(uint64_t now);
  // A shard of the ring is removed.
  void on_removed(uint64_t ring);

 private:
  struct Forwarded : Piece {
    uint64_t ring = 0;
    int64_t server = 0;
    CommandOwner* owner = nullptr;  // null: nothing waits
    Reply reply;
    uint64_t began = 0;
    BufferPool::Pointer memory;
    Bytes bytes;
    enum { kOther, kEndsCopy, kConfirmsCopy } stage = kOther;
  };
  struct Ring {
    int64_t server = 0;  // 0: none
    OnEnd on_end;
    std::unordered_set<Forwarded*> pending;
    uint64_t num_bytes = 0;  // of their payloads
    uint64_t last_answer = 0;
    std::unordered_set<CommandOwner*> stalled;
    bool is_removed = false;  // all its shards have been removed
  };

  void on_piece_end(Piece* piece, const Status& status);
  // Without a connection it may remove shards of the ring.
  void send(Ring* ring, const StoredShard& shard, std::unique_ptr<Forwarded> piece);
  std::unique_ptr<Forwarded> make(const StoredShard& shard, Command::Kind kind) const;
  void copy_part(Ring* ring, const StoredShard& shard, Part part);
  void copy_clients(Ring* ring, const StoredShard& shard);
  void confirm(StoredShard* shard);
  void end_removed(uint64_t number, Ring* ring);
  void stop(uint64_t number, Ring* ring, const Status& why);

  ShardStore& store_;
  Call call_;
  std::unordered_map<uint64_t, Ring> rings_;
};

}  // namespace hvl
