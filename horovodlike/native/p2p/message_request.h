// One send or receive of this rank, from the call to its completion.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "base/types.h"

namespace hvl {

constexpr int kAnySource = HVL_ANY_SOURCE;

// The properties by which messages and receives are matched. Messages with the same source, tag and context are matched
// in the order in which they were sent.
struct MessageHeader {
  int source = 0;        // kAnySource only for a receive
  uint64_t context = 0;  // stands for the process set; see MessageContexts
  int64_t tag = 0;
  DataType dtype = HVL_UINT8;
  uint64_t num_bytes = 0;

  // "4 bytes of float32"
  std::string describe_data() const { return std::to_string(num_bytes) + " bytes of " + name_of(dtype); }
};

// A message that its sender keeps until it is received.
struct Announcement {
  uint64_t id = 0;       // the number that the sender has given the message
  uint64_t address = 0;  // in the sender's memory; 0: it cannot be copied from there
};

struct MessageRequest {
  bool is_send = false;
  MessageHeader header;  // the messenger sets its source and context
  int peer = 0;          // the destination of a send, the source of a receive
  int32_t process_set = 0;
  char* data = nullptr;  // only read by a send
  int64_t handle = 0;
  uint64_t posted_at = 0;
};

using MessageRequestPtr = std::unique_ptr<MessageRequest>;

}  // namespace hvl
