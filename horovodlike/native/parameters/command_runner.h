// Carries out the commands of one client in their order: applies pushes to the shards, and answers pulls.
#pragma once

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "parameters/shard_store.h"

namespace hvl {

class CommandRunner : private ClockClient {
 public:
  // The cost of the commands that one client has carried out before the next client's turn: one command of a large
  // array, or some hundreds of small ones.
  static constexpr uint64_t kTimeSlice = kUsualPayloadBytes;

  // Takes the answers to the commands.
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
    // There is a reply while no command is carried out.
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
  static uint64_t cost_of(const Command& command);
  void carry_out(const Command& command, const Pushed& payload);
  // True if the client has said that it ends the connection.
  bool has_left() const { return has_left_; }

 private:
  Status create(const Command& command);
  Status push(const Command& command, Pushed payload);
  // The elements answer a pull that succeeds.
  Status pull(const Command& command, Pushed payload);
  // Reads the ranges at the front of the payload, and removes them from it.
  Status take_ranges(const Command& command, const Shard& shard, Pushed* payload);
  Status apply(const Command& command, Shard* shard, Pushed elements);
  void end_clocks();
  void on_ticked(uint64_t number, const Status& status) override;

  ShardStore& store_;
  Output& output_;
  std::vector<Range> ranges_;                       // the ranges of the command that is carried out
  std::set<std::pair<uint64_t, uint64_t>> joined_;  // arrays, and their clients whose clocks end with this
  bool has_left_ = false;
};

}  // namespace hvl
