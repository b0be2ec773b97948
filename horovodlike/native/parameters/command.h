// The commands of a client to a server of parameters, and the server's replies, as bytes.
//
// Commands and replies travel in batches: one message has as many as were waiting. The elements of a small push follow
// its command within the batch; those of a large one are a message of their own, whose tag is the command's number, as
// are the elements that a pull returns. A batch has the tag 0. Numbers are little-endian.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "parameters/rule.h"

namespace hvl {

constexpr int64_t kBatchTag = 0;
constexpr uint64_t kInlineBytes = uint64_t{4} << 10;  // of the largest push whose elements are in the batch
constexpr uint64_t kCommandBytes = 72;                // without elements

struct Command {
  enum class Kind : uint8_t { kPush = 1, kPull = 2 };

  Kind kind = Kind::kPush;
  Update update;        // of a push
  uint32_t shard = 0;   // its number on the server
  uint64_t number = 0;  // the client counts its commands, from 1 on
  uint64_t offset = 0;  // of the elements in the shard
  uint64_t count = 0;
  uint64_t num_inline = 0;  // bytes of elements that follow the command
};

// The answer to a push, and to a pull that has failed. A pull is answered by its elements.
struct Reply {
  uint64_t number = 0;
  Status status;
};

using Bytes = std::vector<char>;

// `elements`: num_inline bytes.
void append(const Command& command, const char* elements, Bytes* batch);
void append(const Reply& reply, Bytes* batch);

// Reads a batch that was received. After an error, which says what is wrong, nothing more can be read.
class BatchReader {
 public:
  explicit BatchReader(const Bytes& batch) : next_(batch.data()), end_(batch.data() + batch.size()) {}

  bool is_at_end() const { return next_ == end_; }
  // *elements: num_inline bytes within the batch.
  Status read(Command* command, const char** elements);
  Status read(Reply* reply);

 private:
  bool take(void* to, uint64_t num_bytes);

  const char* next_;
  const char* end_;
};

}  // namespace hvl
