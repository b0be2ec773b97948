// This process as a client of its own server: its commands are carried out without a session, with the memory of their
// caller.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "parameters/client_request.h"
#include "parameters/command_runner.h"

namespace hvl {

// Only the node's thread may use it.
class OwnClient final : private CommandRunner::Output {
 public:
  // `store` must live longer. `notify` is called when progress() may have something to do again.
  OwnClient(std::string server, ShardStore* store, ClientCommand::OnEnd on_end, std::function<void()> notify)
      : server_(std::move(server)), on_end_(std::move(on_end)), notify_(std::move(notify)), runner_(store, this) {}

  const std::string& server() const { return server_; }
  // Takes a command, which is borrowed until it has ended, and so is its memory. Commands are carried out in order.
  void call(ClientCommand* command) { waiting_.push_back(command); }
  // Carries out the commands of a time slice, and ends those that have been answered.
  void progress(bool* progressed);
  bool can_progress() const { return !replies_.empty() || !waiting_.empty(); }
  // Ends all commands that have not ended with an error; progress() must not be called any more.
  void fail(const Status& status);

 private:
  bool copy_to_client(const Command&, const char*, uint64_t) override { return false; }  // see memory_for()
  // The elements go where the caller wants them, since they are not read before the command has ended.
  BufferPool::Pointer memory_for(uint64_t number, uint64_t) override {
    return BufferPool::Pointer(pending_.at(number)->received, {});
  }
  void reply(const Reply& reply) override { replies_.push_back(reply); }
  void return_elements(uint64_t number, BufferPool::Pointer, uint64_t) override { reply(Reply{number, Status()}); }
  void notify() override { notify_(); }

  void end(const Reply& reply);

  const std::string server_;
  const ClientCommand::OnEnd on_end_;
  const std::function<void()> notify_;
  std::deque<ClientCommand*> waiting_;                    // not carried out yet
  std::unordered_map<uint64_t, ClientCommand*> pending_;  // being carried out, by number
  uint64_t next_number_ = 1;
  std::vector<Reply> replies_;
  CommandRunner runner_;
};

}  // namespace hvl
