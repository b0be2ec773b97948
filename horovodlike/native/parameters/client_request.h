// One call of a user to the servers of an array: its commands, until all of them have ended.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "parameters/client_session.h"

namespace hvl {

struct ClientRequest;
struct ShardRoutes;

// A command to one of the servers.
struct RequestPiece : Piece {
  ClientRequest* request = nullptr;
  int64_t server = 0;
  bool is_routed = false;          // sent to the server that has the shard now, and not to `server`
  std::unique_ptr<char[]> memory;  // of the payload or the elements; null: the user's
  std::vector<iovec> places;       // of the received elements, in the user's memory
};

// How a request ends that is none to servers.
enum class Occasion : uint8_t {
  kPieces,      // when its pieces have ended
  kServerEnds,  // with the connection to `server`
  kCopiesEnd    // when `server` has no copies of the shards of `ring` any more
};

struct ClientRequest {
  std::vector<RequestPiece> pieces;
  std::shared_ptr<ShardRoutes> routes;  // null: the shards have no copies
  Occasion occasion = Occasion::kPieces;
  int64_t server = 0;
  uint64_t ring = 0;
  size_t num_left = 0;  // pieces that have not ended
  int64_t handle = 0;
  Status status;  // the first error
};

}  // namespace hvl
