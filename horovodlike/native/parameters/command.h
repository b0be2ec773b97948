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
constexpr uint64_t kInlineBytes = uint64_t{4} << 10;       // size of the largest payload that is in the batch
constexpr uint64_t kMostCommandBytes = 168;                // without its payload
constexpr uint64_t kMostPayloadBytes = uint64_t{1} << 20;  // also for the elements that a pull returns
// Small enough that a rule finds the copied elements in the cache of the processor.
constexpr uint64_t kUsualPayloadBytes = kMostPayloadBytes / 2;

// Chosen by the clients: the array, and the index of the shard in it.
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
    kCreate = 3,  // a shard of `range.count` elements of `dtype`; `range.offset`: the number of clients with a clock
    kRemove = 4,
    kTick = 5,  // `range.offset`: the staleness
    kLeave = 6  // the client ends the connection; there is no reply
  };

  Kind kind = Kind::kPush;
  Part part = Part::kValues;
  Payload format = HVL_PAYLOAD_FULL;  // a push's payload
  DataType dtype = HVL_UINT8;         // the type of a new shard, or of the array of a push or a pull
  Update update;                      // a push's update
  ShardId shard;
  uint64_t number = 0;  // the client counts its commands, from 1 on
  uint64_t client = 0;  // the client that has made the command
  Range range;          // if num_ranges is 0; else `count` is the sum of the ranges
  uint32_t num_ranges = 0;
  uint64_t address = 0;     // where a pull's elements belong in the client's memory, if the server may write there
  uint32_t num_inline = 0;  // bytes of payload that follow the command
};

// The answer to a command, but for a pull that succeeds: its elements answer it, unless they have been written to its
// address.
struct Reply {
  uint64_t number = 0;
  Status status;
};

using Bytes = std::vector<char>;

// `payload`: num_inline bytes.
void append(const Command& command, const char* payload, Bytes* batch);
void append(const Reply& reply, Bytes* batch);

// Reads a batch that was received. After an error nothing more can be read.
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
