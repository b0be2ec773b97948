// One send or receive of this rank, from the call to its completion.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "base/types.h"

namespace hvl {

constexpr int kAnySource = HVL_ANY_SOURCE;

// The description by which a message is matched. Those of one source, tag and context are matched in their order.
struct MessageHeader {
  int source = 0;        // of a receive also kAnySource
  uint64_t context = 0;  // a process set, and which of those that have had its id
  int64_t tag = 0;
  DataType dtype = HVL_UINT8;
  uint64_t num_bytes = 0;

  // "4 bytes of float32"
  std::string describe_data() const { return std::to_string(num_bytes) + " bytes of " + name_of(dtype); }
};

struct MessageRequest {
  bool is_send = false;
  MessageHeader header;  // with the context and the source that the messenger gives to a send
  int peer = 0;          // the destination of a send
  int32_t process_set = 0;
  char* data = nullptr;  // only read by a send
  int64_t handle = 0;
  uint64_t posted_at = 0;
};

using MessageRequestPtr = std::unique_ptr<MessageRequest>;

}  // namespace hvl
