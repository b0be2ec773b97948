// The headers of messages between two ranks. A stream of bytes between them is a sequence of frames. Each frame is a
// header, followed by a payload in three of the kinds:
//
//   kind (1), dtype (1), zeros (6), context (8), tag (8), number of bytes (8), id (8), offset (8), MAC (16)
//
// Numbers are little-endian. Fields that a kind does not use are zero. The MAC is zero where the stream itself is
// trusted: within a host, and where data is sealed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/hmac.h"
#include "base/status.h"
#include "p2p/message_request.h"
#include "transport/transport.h"

namespace hvl {

constexpr size_t kEagerBytes = size_t{8} << 10;      // size of the largest message that is sent eagerly
constexpr size_t kFragmentBytes = size_t{64} << 10;  // size of the largest payload of another frame

struct MessageFrame {
  enum class Kind : uint8_t {
    kEager = 1,     // a whole message
    kAnnounce = 2,  // a message that the sender keeps under an id until it is asked for
    kRequest = 3,   // asks for the message of an id
    kData = 4,      // a fragment of that message, from an offset on
    kDone = 5,      // the message of an id is not needed any more: it was copied, is empty, or does not fit the receive
    kRemoved = 6,   // the message of an id was for a process set that has been removed
    kCredit = 7,    // returns `num_bytes` of credit, for received eager messages
    kEnd = 8,       // the sender leaves the job, and nothing follows
    kBroken = 9     // the job is broken on the sender; the payload is the reason
  };

  Kind kind = Kind::kEager;
  DataType dtype = HVL_UINT8;
  uint64_t context = 0;
  int64_t tag = 0;
  uint64_t num_bytes = 0;  // the message's size; kData, kBroken: the payload's; kCredit: the credit
  uint64_t id = 0;
  uint64_t offset = 0;  // kAnnounce: the address in the sender's memory, if the receiver may copy from there

  // The most that a payload of this kind may have.
  static constexpr uint64_t payload_limit(Kind kind) {
    if (kind == Kind::kEager) return kEagerBytes;
    return kind == Kind::kData || kind == Kind::kBroken ? kFragmentBytes : 0;
  }
  uint64_t payload_bytes() const { return payload_limit(kind) > 0 ? num_bytes : 0; }
  MessageHeader header_from(int source) const { return {source, context, tag, dtype, num_bytes}; }
};

// Encodes and decodes the headers of both directions of a stream.
class FrameCoder {
 public:
  static constexpr size_t kBytes = 64;

  // `keys`: null if the stream is trusted. `peer`: the other rank's name, for errors.
  FrameCoder(const MessageKeys* keys, std::string peer);

  const std::string& peer() const { return peer_; }
  void encode(const MessageFrame& frame, char* bytes);
  // An error says what is wrong with the header.
  Status decode(const char* bytes, MessageFrame* frame);

 private:
  Status wrong(const std::string& flaw) const;

  const bool has_macs_;
  const std::string peer_;
  Hmac send_mac_, receive_mac_;
  uint64_t num_sent_ = 0, num_received_ = 0;  // frames
};

}  // namespace hvl
