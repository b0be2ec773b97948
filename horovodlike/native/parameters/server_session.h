// A client's session at a server: applies its pushes to the shards, and answers its pulls, in the order of the
// commands.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "parameters/session.h"
#include "parameters/shard.h"

namespace hvl {

// By number. Sessions of one thread share them.
using Shards = std::unordered_map<uint32_t, std::unique_ptr<Shard>>;

class ServerSession final : public Session {
 public:
  // `shards` must live longer.
  ServerSession(const std::string& client, std::unique_ptr<PeerStream> stream, const MessageKeys* keys, Shards* shards);

 private:
  // Elements of a push that are in a message of their own, or of a pull.
  struct Elements {
    uint64_t number = 0;
    std::unique_ptr<char[]> memory;  // null: not fetched yet
    uint64_t num_bytes = 0;
    bool is_here = false;
  };

  Status on_batch(Bytes batch) override;
  Status on_elements(uint64_t number, uint64_t num_bytes) override;
  Status on_fetched(uint64_t number) override;
  Status on_sent(uint64_t number) override;

  void fetch_next();
  Status run_commands();
  // Carries the command out; *done is false if it must wait for elements.
  Status run(const Command& command, const char* elements, bool* done);
  Status push(const Command& command, const char* elements, uint64_t num_bytes) const;
  Status pull(const Command& command);

  Shards& shards_;
  std::deque<Bytes> batches_;
  std::optional<BatchReader> reader_;  // of the first batch
  std::optional<Command> command_;     // the one that waits
  const char* inline_elements_ = nullptr;
  std::deque<Elements> pushed_;                      // in the order of their commands
  std::unordered_map<uint64_t, Elements> returned_;  // by number, until they are sent
};

}  // namespace hvl
