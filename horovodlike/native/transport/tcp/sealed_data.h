// The data of collectives in authenticated frames. One direction of a connection is a stream of them:
//
//   length of the payload (4 bytes), MAC(2 n; length), payload, MAC(2 n + 1; payload)
//
// n is the number of the frame, from 0. A MAC is the first 16 bytes of HMAC-SHA256(key; number (8 bytes), bytes).
// Numbers are little-endian. Each direction has its own key, so a frame that is changed, dropped, replayed, reordered
// or reflected to its sender fails. The length has its own MAC: otherwise the receiver would wait for bytes that never
// come if the length was changed to a larger one.
//
// There is no end of the stream: a collective knows how many bytes it waits for, and missing bytes are an error of the
// connection.
//
// These classes are pure: bytes in, bytes out. One thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/hmac.h"
#include "base/status.h"
#include "transport/byte_queue.h"
#include "transport/tcp/seal.h"

namespace hvl {

constexpr const char* kDataFrameName = "data frame";  // in messages
constexpr size_t kDataPayload = size_t{64} << 10;     // the longest
constexpr size_t kDataHeader = sizeof(uint32_t) + kMacBytes;
constexpr size_t kDataFrame = kDataHeader + kDataPayload + kMacBytes;

class DataSealer {
 public:
  explicit DataSealer(const ChannelKey& key) : mac_(key, sizeof key) {}

  // Makes the next frame, a copy of the next bytes of `sent`, when the last one is flushed. Concurrent writes to this
  // memory do not make a frame invalid.
  void seal(const Transfer& sent);
  const char* data() const { return frame_.data() + begin_; }
  size_t size() const { return end_ - begin_; }
  void drop(size_t num_bytes) { begin_ += num_bytes; }
  bool is_flushed() const { return begin_ == end_; }
  // The size of the last frame's payload.
  size_t payload_bytes() const { return payload_bytes_; }

 private:
  Hmac mac_;
  uint64_t next_ = 0;
  std::vector<char> frame_;
  size_t begin_ = 0, end_ = 0;
  size_t payload_bytes_ = 0;
};

class DataOpener {
 public:
  // `peer` names the sender in messages.
  DataOpener(const ChannelKey& key, std::string peer) : mac_(key, sizeof key), peer_(std::move(peer)) {}

  // Returns the memory for the next bytes of the stream; call it after open(). add() tells how many were received.
  char* room(size_t* num_bytes);
  void add(size_t num_bytes) { end_ += num_bytes; }
  // Moves verified bytes to their destinations, as far as these are known. An error names the fault in a frame, and is
  // final: nothing of that frame has been moved, and nothing will be.
  Status open(Transfer* received);

 private:
  // Verifies the next frame if it is complete. Returns the error as text, empty if there is none.
  std::string verify();
  std::string verify_header(const char* frame);

  Hmac mac_;
  const std::string peer_;
  std::vector<char> bytes_;  // the received bytes are from begin_ to end_
  size_t begin_ = 0, end_ = 0;
  size_t length_ = 0;        // the payload's length of the frame in front, if its header is verified; else 0
  size_t num_verified_ = 0;  // bytes of payload in front, with their MAC behind them
  uint64_t next_ = 0;        // the number of the frame that is verified next
  Status failure_;
};

// Both directions of a connection.
struct DataSeal {
  DataSeal(const ChannelKey& send_key, const ChannelKey& receive_key, const std::string& peer)
      : sealer(send_key), opener(receive_key, peer) {}

  DataSealer sealer;
  DataOpener opener;
};

}  // namespace hvl
