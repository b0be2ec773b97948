// One call of a user to the servers of an array: its commands, until all of them have ended.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parameters/command.h"

namespace hvl {

struct ClientRequest;

// A command to one of the servers, with its memory.
struct ClientCommand : Command {
  // Called when a command has ended, with its status.
  using OnEnd = std::function<void(ClientCommand* command, const Status& status)>;

  ClientRequest* request = nullptr;
  int64_t server = 0;
  const char* sent = nullptr;       // the payload
  uint64_t num_sent = 0;            // bytes
  char* received = nullptr;         // memory for the elements of a pull
  uint64_t num_received = 0;        // bytes
  std::unique_ptr<char[]> memory;   // holds the payload or the elements; null: the user's does
  std::vector<iovec> destinations;  // where received elements go, in the user's memory
  bool is_sent = false;             // the payload, if it is a message of its own
  bool is_coming = false;           // the elements of a pull are being written to `received`

  // True if the payload is a message of its own.
  bool is_large() const { return num_sent > kInlineBytes; }
  // Called by a server's client, which counts its commands.
  void set_number(uint64_t next) {
    number = next;
    num_inline = is_large() ? 0 : static_cast<uint32_t>(num_sent);
  }
};

struct ClientRequest {
  std::vector<ClientCommand> commands;
  size_t num_left = 0;  // commands that have not ended
  int64_t handle = 0;
  Status status;  // the first error
};

// The status of a reply, for the user.
inline Status status_of(const Reply& reply, const std::string& server) {
  if (reply.status.ok()) return Status();
  return Status(reply.status.code(), server + ": " + reply.status.message());
}

}  // namespace hvl
