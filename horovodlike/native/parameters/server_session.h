// A client's session at a server: applies its pushes to the shards, and answers its pulls, in the order of the
// commands.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "parameters/session.h"
#include "parameters/shard_store.h"

namespace hvl {

class ServerSession final : public Session, private ClockClient {
 public:
  // `store` must live longer. `on_ticked` is called when a tick of this client has ended, perhaps by another session:
  // progress() sends the reply.
  ServerSession(const std::string& client, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
                ShardStore* store, std::function<void()> on_ticked = nullptr);
  ~ServerSession() override;

  // True if the client has said that it ends the connection.
  bool has_left() const { return has_left_; }
  // True if the last progress() has left commands to the next one, so that other sessions get their turn.
  bool has_more() const { return budget_ == 0; }

 private:
  // The payload of a command that is in a message of its own, or the elements of a pull.
  struct Elements {
    uint64_t number = 0;
    BufferPool::Pointer memory;  // null: not fetched yet
    uint64_t num_bytes = 0;
    bool is_here = false;
  };
  // The payload of a command.
  struct Pushed {
    const char* bytes = nullptr;
    uint64_t num_bytes = 0;
  };

  Status on_batch(Bytes batch) override;
  Status on_elements(uint64_t number, uint64_t num_bytes) override;
  Status on_fetched(uint64_t number) override;
  Status on_sent(uint64_t number) override;
  Status before_sending() override;
  void on_ticked(uint64_t number, const Status& status) override;

  void fetch_next();
  Status run_commands();
  // Carries the command out; *done is false if it must wait for its payload or for room.
  Status run(const Command& command, bool* done);
  Status carry_out(const Command& command, const Pushed& payload);
  // Reads the ranges at the front of the payload, and removes them from it.
  Status take_ranges(const Command& command, const Shard& shard, Pushed* payload);
  Status push(const Command& command, Shard* shard, Pushed elements);
  Status pull(const Command& command, const Shard& shard);

  ShardStore& store_;
  const std::function<void()> notify_;
  std::deque<Bytes> batches_;
  uint64_t num_waiting_bytes_ = 0;     // of the batches
  std::optional<BatchReader> reader_;  // of the first batch
  std::optional<Command> command_;     // the one that waits
  uint64_t budget_ = 1;                // bytes of elements that commands may use until the next progress()
  const char* inline_payload_ = nullptr;
  std::vector<Range> ranges_;                        // of the command that is carried out
  std::deque<Elements> pushed_;                      // in the order of their commands
  uint64_t last_pushed_ = 0;                         // the number of the last elements that came
  std::unordered_map<uint64_t, Elements> returned_;  // by number, until they are sent
  bool has_left_ = false;
};

}  // namespace hvl
