// The commands of a client to a server of parameters, and the server's replies, as bytes.
//
// Commands and replies travel in batches: one message has as many as were waiting. The payload of a command is the
// ranges of its elements, if there are several, and the elements of a push. A small one follows its command within the
// batch; a large one is a message of its own, whose tag is the command's number, as are the elements that a pull
// returns. A batch has the tag 0. Numbers are little-endian.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "parameters/payload.h"
#include "parameters/rule.h"
#include "parameters/shard.h"

namespace hvl {

constexpr int64_t kBatchTag = 0;
constexpr uint64_t kInlineBytes = uint64_t{4} << 10;     // of the largest payload that is in the batch
constexpr uint64_t kMostCommandBytes = 176;              // without its payload
constexpr uint64_t kPieceBytesMost = uint64_t{1} << 20;  // of the elements, and of the payload, of a command
// So few that a rule finds in the cache of the processor what has just been copied.
constexpr uint64_t kUsualPieceBytes = kPieceBytesMost / 2;

// Chosen by the clients: the array, and the place of the shard in it.
struct ShardId {
  uint64_t array = 0;
  uint32_t index = 0;

  bool operator==(const ShardId& other) const { return array == other.array && index == other.index; }
};

struct ShardIdHash {
  size_t operator()(const ShardId& id) const { return std::hash<uint64_t>()(id.array * 31 + id.index); }
};

struct Command {
  enum class Kind : uint8_t {
    kPush = 1,
    kPull = 2,
    kCreate = 3,  // a shard of `range.count` elements of `dtype`; `range.offset`: the number of clients with a clock.
                  // The payload is the RingInfo of a shard that has a copy
    kRemove = 4,
    kTick = 5,   // `range.offset`: the staleness
    kLeave = 6,  // the client ends the connection; there is no reply
    kJoin = 7,   // the client has a clock of the array: it stops when this connection ends
    kAwait = 8,  // the reply comes when the shard has a copy
    kAsk = 9,    // the reply shows that the server is alive, and that what came before has been carried out
    kCopy = 10,  // a copy of a shard begins, as in kCreate: its parts follow as pushes
    kAdopt = 11  // `range.count` ClientStates of the copy; `range.offset`: 1. Without any, and 0: the copy is complete
  };

  Kind kind = Kind::kPush;
  Part part = Part::kValues;
  Payload format = HVL_PAYLOAD_FULL;  // of a push
  DataType dtype = HVL_UINT8;         // of a new shard, or of the array that a push or a pull is for
  Update update;                      // of a push
  ShardId shard;
  uint64_t number = 0;        // the client counts its commands, from 1 on
  bool insists = false;       // the client has not found the primary for long: a server with a copy becomes it
  bool is_forwarded = false;  // by the primary of the shard
  bool resumes = false;       // the first one of a client that knows what was refused before
  uint64_t client = 0;        // the one that has made the command
  uint64_t sequence = 0;      // rises with the commands of a client to a shard, whatever server it sends them to
  uint32_t view = 0;          // of the shard, as the client knows it; 0: the shard has no copy
  Range range;                // if num_ranges is 0; else `count` is the sum of the ranges
  uint32_t num_ranges = 0;
  uint64_t address = 0;  // of a pull: where the elements belong in the client's memory, if the server may write there
  uint32_t num_inline = 0;  // bytes of payload that follow the command
};

// The answer to a command, but for a pull that succeeds: its elements answer it, unless they have been written to its
// address. A status that is_lost() refuses it: the server does not have the shard, but another one may. Then the server
// refuses all that the client sends to the shard, until a command that resumes: else one could overtake those before
// it.
struct Reply {
  uint64_t number = 0;
  Status status;
  uint32_t view = 0;  // of the shard
};

// How a shard is kept at two servers of a ring.
struct RingInfo {
  uint64_t ring = 0;      // chosen by the clients; 0: there is no copy
  uint64_t patience = 0;  // nanoseconds: a server that does not answer for so long is lost
  uint64_t view = 1;      // rises when one of the two servers is lost
};

// The memory that a server has of a client of a shard.
struct ClientState {
  static constexpr uint64_t kNoClock = UINT64_MAX;

  uint64_t client = 0;  // 0: of all clients: the number that is expected, and that of the live ones
  uint64_t mark = 0;
  uint64_t clock = kNoClock;
};

constexpr uint64_t kPause = 250000000;  // nanoseconds: a thread that has not run for so long was paused
constexpr uint64_t kLeastPatience = 1000000000, kMostPatience = 3600 * UINT64_C(1000000000);

using Bytes = std::vector<char>;

// `payload`: num_inline bytes.
void append(const Command& command, const char* payload, Bytes* batch);
void append(const Reply& reply, Bytes* batch);

// Reads a batch that was received. After an error, which says what is wrong, nothing more can be read.
class BatchReader {
 public:
  explicit BatchReader(const Bytes& batch) : next_(batch.data()), end_(batch.data() + batch.size()) {}

  bool is_at_end() const { return next_ == end_; }
  // *payload: num_inline bytes within the batch.
  Status read(Command* command, const char** payload);
  Status read(Reply* reply);

 private:
  bool take(void* to, uint64_t num_bytes);

  const char* next_;
  const char* end_;
};

}  // namespace hvl
