// A client's session with one server of parameters.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "parameters/session.h"

namespace hvl {

class ClientSession final : public Session {
 public:
  // Called by progress() when a command has ended, with its number and its status.
  using OnEnd = std::function<void(uint64_t number, const Status& status)>;

  ClientSession(const std::string& server, std::unique_ptr<PeerStream> stream, const MessageKeys* keys, OnEnd on_end);

  // Push and pull elements [offset, offset + count) of a shard; they return the number of the command. Commands of a
  // session are carried out in order. The memory is borrowed until the command has ended.
  uint64_t push(const Update& update, uint32_t shard, uint64_t offset, uint64_t count, const char* elements,
                uint64_t num_bytes);
  uint64_t pull(uint32_t shard, uint64_t offset, uint64_t count, char* elements, uint64_t num_bytes);
  bool has_pending() const { return !pending_.empty(); }
  // Ends all commands that have not ended with an error; progress() must not be called any more.
  void fail(const Status& status);

 private:
  struct Pending {
    Command::Kind kind = Command::Kind::kPush;
    char* elements = nullptr;  // memory for those that a pull returns
    uint64_t num_bytes = 0;
  };

  Status on_batch(Bytes batch) override;
  Status on_elements(uint64_t number, uint64_t num_bytes) override;
  Status on_fetched(uint64_t number) override;
  Status on_sent(uint64_t number) override;
  void end(uint64_t number, const Status& status);

  const OnEnd on_end_;
  std::unordered_map<uint64_t, Pending> pending_;  // by number
  uint64_t next_number_ = 1;
};

}  // namespace hvl
