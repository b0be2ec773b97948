// Carries out the commands of one client, or of the primary of shards whose copies are here, in their order: applies
// pushes to the shards, and answers pulls.
#pragma once

#include <cstdint>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "parameters/shard_store.h"

namespace hvl {

class CommandRunner : private ClockClient, private CommandOwner {
 public:
  // Takes what answers the commands.
  class Output {
   public:
    virtual ~Output() = default;
    virtual void reply(const Reply& reply) = 0;
    // Copies the elements of a pull to where the client wants them; false: it cannot. After true, return_elements() has
    // no memory.
    virtual bool copy_to_client(const Command& command, const char* elements, uint64_t num_bytes) = 0;
    // Returns memory for the elements of a pull.
    virtual BufferPool::Pointer memory_for(uint64_t number, uint64_t num_bytes) = 0;
    virtual void return_elements(uint64_t number, BufferPool::Pointer memory, uint64_t num_bytes) = 0;
    // There are new answers, or there is room for commands, when none is carried out.
    virtual void notify() = 0;
  };
  // The payload of a command.
  struct Pushed {
    const char* bytes = nullptr;
    uint64_t num_bytes = 0;
  };

  // Both must live longer.
  CommandRunner(ShardStore* store, Output* output) : store_(*store), output_(*output) {}
  ~CommandRunner() override;
  CommandRunner(const CommandRunner&) = delete;
  CommandRunner& operator=(const CommandRunner&) = delete;

  // True if the payload is a message of its own.
  static bool has_large_payload(const Command& command);
  // False: the command must wait; notify() is called then.
  bool has_room_for(const Command& command);
  // `memory`: of the payload, if it is not within a batch.
  void carry_out(const Command& command, const Pushed& payload, BufferPool::Pointer memory);
  // Pulls whose elements may not be returned yet.
  size_t num_pulled() const { return pulled_.size(); }
  // True if the client has said that it ends the connection.
  bool has_left() const { return has_left_; }

 private:
  // A command that is carried out.
  struct Running {
    const Command& command;
    Pushed payload;
    BufferPool::Pointer memory;
    StoredShard* shard = nullptr;
    bool replies = true;
  };
  struct Pulled {
    BufferPool::Pointer memory;
    uint64_t num_bytes = 0;
  };
  struct ClientShard {
    uint64_t client;
    ShardId shard;

    bool operator<(const ClientShard& other) const {
      return std::tie(client, shard.array, shard.index) < std::tie(other.client, other.shard.array, other.shard.index);
    }
  };

  // Of a client.
  Status run_direct(Running* running);
  Status run_of_shard(Running* running);
  Status create(Running* running);
  Status remove(Running* running);
  void tick(Running* running);
  Status push(Running* running);
  Status pull(Running* running);
  // Of the primary of a shard whose copy is here.
  Status run_forwarded(Running* running);
  Status change_copy(Running* running);
  // Reads the ranges at the front of the payload, and removes them from it.
  Status take_ranges(const Command& command, const Shard& shard, Pushed* payload);
  Status apply(const Command& command, Shard* shard, Pushed elements);
  void forward(Running* running, const Command& command, Pushed payload, CommandOwner* owner, const Status& status);
  void forward_values(Running* running, const Status& status);
  Reply reply_to(const Running& running, const Status& status = Status()) const;
  void reply(const Reply& reply);
  void return_pulled(uint64_t number);
  void on_ticked(uint64_t number, const Status& status) override;
  void on_settled(const Reply& settled) override;
  void on_room() override { output_.notify(); }

  ShardStore& store_;
  Output& output_;
  std::vector<Range> ranges_;                             // of the command that is carried out
  std::unordered_map<uint64_t, Pulled> pulled_;           // by number
  std::unordered_map<uint64_t, ClientShard> unanswered_;  // by number: the commands to shards with copies
  std::set<ClientShard> refused_;                         // until the client resumes
  std::set<std::pair<uint64_t, uint64_t>> joined_;        // arrays, and their clients whose clocks end with this
  bool has_left_ = false;
};

}  // namespace hvl
