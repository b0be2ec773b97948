// Authenticated frames. One direction of a connection is a stream of them:
//
//   length (4 bytes), payload, first 16 bytes of HMAC-SHA256(key; number of the frame (8 bytes), length, payload)
//
// Numbers are little-endian, and frames are numbered from 0. An end marker follows them: a length above the limit of a
// frame, and no payload. So the end of the stream is authenticated, too, and a killed peer, whose kernel closes the
// connection normally, is distinguished from one that has finished. By its number and the direction's own key, a frame
// that is changed, dropped, replayed, reordered or reflected to its sender fails.
//
// Both classes are pure: bytes in, bytes out. One thread at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/hmac.h"
#include "base/status.h"
#include "transport/byte_queue.h"
#include "transport/transport.h"

namespace hvl {

constexpr size_t kMacBytes = 16;

using ChannelKey = uint8_t[HVL_KEY_BYTES];

// The MAC of bytes under a number that is used once.
Sha256::Digest mac_of(Hmac* mac, uint64_t number, const char* bytes, size_t num_bytes);
// True if the right MAC is behind the bytes.
bool is_mac_of(Hmac* mac, uint64_t number, const char* bytes, size_t num_bytes);

// Returns the message for a frame whose MAC is wrong. `noun`: the word for such frames; number 0 is "frame 1".
std::string wrong_mac(const std::string& noun, uint64_t number, const std::string& peer);
// The same if the frame may be another one of the same sender: that helps to find the attacker. `is_frame(number)` is
// true if it is the frame of that number.
template <typename IsFrame>
std::string explain_frame(const std::string& noun, uint64_t next, const std::string& peer, IsFrame&& is_frame) {
  constexpr uint64_t kNeighbours = 16;  // to either side
  for (uint64_t number = next - std::min(next, kNeighbours); number <= next + kNeighbours; ++number) {
    if (!is_frame(number)) continue;
    return noun + " " + std::to_string(number + 1) + " from " + peer + " came in place of " + noun + " " +
           std::to_string(next + 1) + ": it was " +
           (number < next ? "replayed" : "reordered, or others were dropped,") + " on the way";
  }
  return wrong_mac(noun, next, peer);
}

class Sealer {
 public:
  explicit Sealer(const ChannelKey& key) : mac_(key, sizeof key) {}

  // Appends the next frame. The payload has kFrameLimit bytes at most.
  void seal(const std::string& payload, ByteQueue* stream);
  // Appends the end of the stream: there may be no frame after it.
  void seal_end(ByteQueue* stream);

 private:
  void append(uint32_t length, const std::string& payload, ByteQueue* stream);

  Hmac mac_;
  uint64_t next_ = 0;
};

class Opener {
 public:
  // `peer` names the sender in messages.
  Opener(const ChannelKey& key, std::string peer) : mac_(key, sizeof key), peer_(std::move(peer)) {}

  // Takes the next bytes of the stream. An error names the fault in them; no frames follow.
  Status feed(const void* bytes, size_t count);
  // There are no more bytes. An error means that the stream is not complete.
  Status close() const;

  bool has_frame() const { return num_verified_ > 0; }
  // Returns the payload of the next complete and verified frame.
  bool receive(std::string* payload);
  // True if the sender has ended the stream.
  bool is_at_end() const { return at_end_; }

 private:
  std::string verify();
  bool is_frame(uint64_t number, const char* frame, size_t payload_bytes);
  std::string explain(const char* frame, size_t payload_bytes);

  Hmac mac_;
  std::string peer_;
  ByteQueue bytes_;          // memory for received bytes, not for the length that a frame claims
  size_t num_verified_ = 0;  // bytes in front: verified frames
  uint64_t next_ = 0;        // the number of the frame behind them
  bool at_end_ = false;      // and that was the last
  Status failure_;
};

}  // namespace hvl
