// A client's session at a server: takes its commands, which are carried out in their order, and sends the replies.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "parameters/command_runner.h"
#include "parameters/session.h"

namespace hvl {

class ServerSession final : public Session, private CommandRunner::Output {
 public:
  // `store` must live longer. `notify` is called when there is something to send, perhaps by another session:
  // progress() sends it.
  ServerSession(const std::string& client, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
                ShardStore* store, std::function<void()> notify = nullptr);
  ~ServerSession() override;

  // True if the client has said that it ends the connection.
  bool has_left() const { return runner_->has_left(); }
  // True if the last progress() has left commands to the next one, so that other sessions have their turn.
  bool has_more() const { return budget_ == 0; }

 private:
  // The payload of a command that is in a message of its own, or the elements of a pull.
  struct Elements {
    uint64_t number = 0;
    BufferPool::Pointer memory;  // null: not fetched yet
    uint64_t num_bytes = 0;
    bool is_here = false;
  };

  Status on_batch(Bytes batch) override;
  Status on_elements(uint64_t number, uint64_t num_bytes) override;
  Status on_fetched(uint64_t number) override;
  Status on_sent(uint64_t number) override;
  Status before_sending() override;

  void reply(const Reply& reply) override { put(reply); }
  bool copy_to_client(const Command& command, const char* elements, uint64_t num_bytes) override {
    return can_copy() && stream().copy_to(command.address, elements, num_bytes);
  }
  BufferPool::Pointer memory_for(uint64_t, uint64_t num_bytes) override { return store_.buffers().take(num_bytes); }
  void return_elements(uint64_t number, BufferPool::Pointer memory, uint64_t num_bytes) override;
  void notify() override;

  bool can_copy() const { return stream().can_copy() && !stream().has_refused(); }
  void fetch_next();
  Status run_commands();
  // Carries the command out; *done is false if it must wait for its payload or for room.
  Status run(const Command& command, bool* done);

  ShardStore& store_;
  const std::function<void()> notify_;
  std::deque<Bytes> batches_;
  uint64_t num_waiting_bytes_ = 0;     // size of the batches
  std::optional<BatchReader> reader_;  // reads the first batch
  std::optional<Command> command_;     // the command that waits
  uint64_t last_number_ = 0;           // the last command's
  uint64_t budget_ = 1;                // the costs that commands may have until the next progress()
  const char* inline_payload_ = nullptr;
  std::deque<Elements> pushed_;                                 // in the order of their commands
  uint64_t last_pushed_ = 0;                                    // the number of the last elements that came
  std::unordered_map<uint64_t, BufferPool::Pointer> returned_;  // by number, until they are sent
  std::unique_ptr<CommandRunner> runner_;
};

}  // namespace hvl
