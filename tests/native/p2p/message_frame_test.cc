#include "p2p/message_frame.h"

#include <cstring>
#include <string>

#include "check.h"

namespace hvl {
namespace {

MessageKeys keys_of(uint8_t send, uint8_t receive) {
  MessageKeys keys;
  std::memset(keys.send, send, sizeof keys.send);
  std::memset(keys.receive, receive, sizeof keys.receive);
  return keys;
}

MessageFrame announcement() {
  MessageFrame frame;
  frame.kind = MessageFrame::Kind::kAnnounce;
  frame.dtype = HVL_BFLOAT16;
  frame.context = 3;
  frame.tag = int64_t{1} << 62;
  frame.num_bytes = uint64_t{1} << 40;
  frame.id = 17;
  frame.offset = 5;
  return frame;
}

struct Header {
  char bytes[FrameCoder::kBytes];
};

Header encoded(FrameCoder* coder, const MessageFrame& frame) {
  Header header;
  coder->encode(frame, header.bytes);
  return header;
}

TEST(a_frame_is_read_as_it_was_written) {
  const MessageKeys left = keys_of(1, 2), right = keys_of(2, 1);
  for (bool has_keys : {false, true}) {
    FrameCoder from(has_keys ? &left : nullptr, "rank 1"), to(has_keys ? &right : nullptr, "rank 0");
    for (int round = 0; round < 3; ++round) {
      const Header header = encoded(&from, announcement());
      MessageFrame read;
      CHECK_EQ(to.decode(header.bytes, &read).message(), "");
      CHECK_EQ(read.kind, MessageFrame::Kind::kAnnounce);
      const MessageHeader message = read.header_from(4);
      CHECK_EQ(message.source, 4);
      CHECK_EQ(message.dtype, HVL_BFLOAT16);
      CHECK_EQ(message.context, 3u);
      CHECK_EQ(message.tag, int64_t{1} << 62);
      CHECK_EQ(message.num_bytes, uint64_t{1} << 40);
      CHECK_EQ(read.id, 17u);
      CHECK_EQ(read.offset, 5u);
      CHECK_EQ(read.payload_bytes(), 0u);
    }
  }
}

TEST(a_header_that_was_changed_replayed_or_reordered_is_refused) {
  const MessageKeys left = keys_of(1, 2), right = keys_of(2, 1);
  FrameCoder from(&left, "rank 1");
  const Header first = encoded(&from, announcement()), second = encoded(&from, announcement());
  MessageFrame read;
  for (size_t byte = 0; byte < FrameCoder::kBytes; ++byte) {
    FrameCoder to(&right, "rank 0");
    Header changed = first;
    changed.bytes[byte] = static_cast<char>(changed.bytes[byte] ^ 1);
    const Status status = to.decode(changed.bytes, &read);
    CHECK_EQ(status.code(), HVL_JOB_BROKEN);
    CHECK_HAS(status.message(), "header 1 of the messages from rank 0 has a wrong MAC");
  }
  FrameCoder to(&right, "rank 0");
  CHECK(!to.decode(second.bytes, &read).ok());
  CHECK(to.decode(first.bytes, &read).ok());
  CHECK(!to.decode(first.bytes, &read).ok());
  CHECK(to.decode(second.bytes, &read).ok());
  FrameCoder reflected(&left, "rank 1");
  CHECK(!reflected.decode(first.bytes, &read).ok());
}

TEST(a_header_without_meaning_is_refused) {
  struct Case {
    size_t byte;
    char value;
    const char* flaw;
  };
  for (const Case& each :
       {Case{0, 0, "unknown kind"}, Case{0, 10, "unknown kind"}, Case{0, 127, "unknown kind"},
        Case{1, 13, "unknown dtype"}, Case{2, 1, "another version"}, Case{7, 1, "another version"}}) {
    FrameCoder coder(nullptr, "rank 0");
    Header header = encoded(&coder, announcement());
    header.bytes[each.byte] = each.value;
    MessageFrame read;
    const Status status = coder.decode(header.bytes, &read);
    CHECK_EQ(status.code(), HVL_JOB_BROKEN);
    CHECK_HAS(status.message(), each.flaw);
  }
}

TEST(a_payload_has_a_limit) {
  FrameCoder coder(nullptr, "rank 0");
  MessageFrame frame, read;
  const auto is_read = [&](MessageFrame::Kind kind, uint64_t num_bytes) {
    frame.kind = kind;
    frame.num_bytes = num_bytes;
    return coder.decode(encoded(&coder, frame).bytes, &read).ok();
  };
  CHECK(is_read(MessageFrame::Kind::kEager, kEagerBytes));
  CHECK_EQ(read.payload_bytes(), kEagerBytes);
  CHECK(!is_read(MessageFrame::Kind::kEager, kEagerBytes + 1));
  CHECK(is_read(MessageFrame::Kind::kData, kFragmentBytes));
  CHECK(!is_read(MessageFrame::Kind::kData, kFragmentBytes + 1));
  CHECK(!is_read(MessageFrame::Kind::kData, UINT64_MAX));
  CHECK(is_read(MessageFrame::Kind::kBroken, kFragmentBytes));
  CHECK_EQ(read.payload_bytes(), kFragmentBytes);
  CHECK(!is_read(MessageFrame::Kind::kBroken, kFragmentBytes + 1));
  CHECK(is_read(MessageFrame::Kind::kAnnounce, UINT64_MAX));
}

}  // namespace
}  // namespace hvl
