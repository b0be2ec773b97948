// One call of a user to the servers of an array: its commands, until all of them have ended.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "parameters/client_session.h"

namespace hvl {

struct ClientRequest;

// A command to one of the servers.
struct RequestPiece : Piece {
  ClientRequest* request = nullptr;
  int64_t server = 0;
  std::unique_ptr<char[]> memory;  // of the payload or the elements; null: the user's
  std::vector<iovec> places;       // of the received elements, in the user's memory
};

struct ClientRequest {
  std::vector<RequestPiece> pieces;
  size_t num_left = 0;  // pieces that have not ended
  int64_t handle = 0;
  Status status;  // the first error
};

}  // namespace hvl
