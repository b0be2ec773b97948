#include "p2p/message_frame.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hvl {

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers need byte swaps here");

struct WireHeader {
  uint8_t kind;
  uint8_t dtype;
  uint8_t zeros[6];
  uint64_t context;
  int64_t tag;
  uint64_t num_bytes;
  uint64_t id;
  uint64_t offset;
};
constexpr size_t kHeaderMacBytes = 16;
static_assert(sizeof(WireHeader) + kHeaderMacBytes == FrameCoder::kBytes, "the header has no gaps");

const MessageKeys kNoKeys{};

// The MAC covers the frame's number, so that replayed and reordered frames are invalid.
Sha256::Digest mac_of_header(Hmac* mac, uint64_t number, const char* bytes) {
  mac->add(&number, sizeof number);
  mac->add(bytes, sizeof(WireHeader));
  return mac->digest();
}

const char* flaw_of(const WireHeader& wire) {
  constexpr auto kLast = static_cast<uint8_t>(MessageFrame::Kind::kBroken);
  if (wire.kind == 0 || wire.kind > kLast) return "has an unknown kind";
  if (wire.dtype >= kNumDataTypes) return "has an unknown dtype";
  if (std::any_of(std::begin(wire.zeros), std::end(wire.zeros), [](uint8_t byte) { return byte != 0; })) {
    return "is of another version";
  }
  const uint64_t limit = MessageFrame::payload_limit(static_cast<MessageFrame::Kind>(wire.kind));
  return limit > 0 && wire.num_bytes > limit ? "has too long a payload" : nullptr;
}

}  // namespace

FrameCoder::FrameCoder(const MessageKeys* keys, std::string peer)
    : has_macs_(keys != nullptr),
      peer_(std::move(peer)),
      send_mac_((keys != nullptr ? *keys : kNoKeys).send, sizeof kNoKeys.send),
      receive_mac_((keys != nullptr ? *keys : kNoKeys).receive, sizeof kNoKeys.receive) {}

void FrameCoder::encode(const MessageFrame& frame, char* bytes) {
  WireHeader wire{static_cast<uint8_t>(frame.kind),
                  static_cast<uint8_t>(frame.dtype),
                  {},
                  frame.context,
                  frame.tag,
                  frame.num_bytes,
                  frame.id,
                  frame.offset};
  std::memcpy(bytes, &wire, sizeof wire);
  if (has_macs_) {
    std::memcpy(bytes + sizeof wire, mac_of_header(&send_mac_, num_sent_++, bytes).data(), kHeaderMacBytes);
  } else {
    std::memset(bytes + sizeof wire, 0, kHeaderMacBytes);
  }
}

Status FrameCoder::decode(const char* bytes, MessageFrame* frame) {
  WireHeader wire;
  std::memcpy(&wire, bytes, sizeof wire);
  if (has_macs_ && !equal_in_constant_time(mac_of_header(&receive_mac_, num_received_, bytes).data(),
                                           bytes + sizeof wire, kHeaderMacBytes)) {
    return wrong("has a wrong MAC: it was changed, replayed or reordered on the way");
  }
  const char* flaw = flaw_of(wire);
  if (flaw != nullptr) return wrong(flaw);
  ++num_received_;
  frame->kind = static_cast<MessageFrame::Kind>(wire.kind);
  frame->dtype = static_cast<DataType>(wire.dtype);
  frame->context = wire.context;
  frame->tag = wire.tag;
  frame->num_bytes = wire.num_bytes;
  frame->id = wire.id;
  frame->offset = wire.offset;
  return Status();
}

Status FrameCoder::wrong(const std::string& flaw) const {
  return Status(HVL_JOB_BROKEN,
                "header " + std::to_string(num_received_ + 1) + " of the messages from " + peer_ + " " + flaw);
}

}  // namespace hvl
