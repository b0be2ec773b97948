// A client's session with one server of parameters.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "parameters/client_request.h"
#include "parameters/session.h"

namespace hvl {

class ClientSession final : public Session {
 public:
  ClientSession(const std::string& server, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
                ClientCommand::OnEnd on_end)
      : Session(server, std::move(stream), keys), on_end_(std::move(on_end)) {}

  // Takes a command, which is borrowed until it has ended, and so is its memory. Commands of a session are carried out
  // in order. They leave in batches: as few at a time as the server must keep for that.
  void call(ClientCommand* command) { waiting_.push_back(command); }
  bool can_call() const { return !waiting_.empty() && has_room_for(*waiting_.front()); }
  // Tells the server that the client ends the connection.
  void leave();
  // Ends all commands that have not ended with an error; progress() must not be called any more.
  void fail(const Status& status);

 private:
  Status on_batch(Bytes batch) override;
  Status on_elements(uint64_t number, uint64_t num_bytes) override;
  Status on_fetched(uint64_t number) override;
  Status on_sent(uint64_t number) override;
  Status before_sending() override;

  static uint64_t cost_of(const ClientCommand& command);
  bool has_room_for(const ClientCommand& command) const;
  void end(uint64_t number, const Status& status);

  const ClientCommand::OnEnd on_end_;
  std::deque<ClientCommand*> waiting_;                    // to be sent
  std::unordered_map<uint64_t, ClientCommand*> pending_;  // by number
  uint64_t next_number_ = 1;
  size_t num_large_ = 0;          // pending commands with a payload of their own
  uint64_t num_batch_bytes_ = 0;  // size of pending commands in batches
};

}  // namespace hvl
