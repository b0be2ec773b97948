#include "transport/tcp/seal.h"

#include <cstring>

namespace hvl {

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames need byte swaps here");

using Length = uint32_t;

constexpr Length kEnd = UINT32_MAX;

// "frame 1" is the first one.
std::string name_of(uint64_t number) { return "frame " + std::to_string(number + 1); }

}  // namespace

Sha256::Digest mac_of(Hmac* mac, uint64_t number, const char* bytes, size_t num_bytes) {
  mac->add(&number, sizeof number);
  mac->add(bytes, num_bytes);
  return mac->digest();
}

bool is_mac_of(Hmac* mac, uint64_t number, const char* bytes, size_t num_bytes) {
  return equal_in_constant_time(mac_of(mac, number, bytes, num_bytes).data(), bytes + num_bytes, kMacBytes);
}

std::string wrong_mac(const std::string& noun, uint64_t number, const std::string& peer) {
  return "the MAC of " + noun + " " + std::to_string(number + 1) + " from " + peer +
         " is wrong: it was changed on the way, or the other side has another key";
}

void Sealer::seal(const std::string& payload, ByteQueue* stream) {
  append(static_cast<Length>(payload.size()), payload, stream);
}

void Sealer::seal_end(ByteQueue* stream) { append(kEnd, std::string(), stream); }

void Sealer::append(Length length, const std::string& payload, ByteQueue* stream) {
  const size_t num_bytes = sizeof length + payload.size();
  stream->append(&length, sizeof length);
  stream->append(payload.data(), payload.size());
  const char* frame = stream->data() + stream->size() - num_bytes;
  stream->append(mac_of(&mac_, next_++, frame, num_bytes).data(), kMacBytes);
}

Status Opener::feed(const void* bytes, size_t count) {
  if (!failure_.ok()) return failure_;
  bytes_.append(bytes, count);
  const std::string flaw = verify();
  if (!flaw.empty()) {
    failure_ = Status(HVL_JOB_BROKEN, flaw);
    bytes_.clear();
    num_verified_ = 0;
  }
  return failure_;
}

// Verifies the complete frames. Returns the error as text, empty if there is none.
std::string Opener::verify() {
  for (;;) {
    const char* frame = bytes_.data() + num_verified_;
    const size_t here = bytes_.size() - num_verified_;
    Length length;
    if (here < sizeof length) return "";
    std::memcpy(&length, frame, sizeof length);
    if (length > kFrameLimit && length != kEnd) {
      return "a frame of " + std::to_string(length) + " bytes from " + peer_ + " is over the limit of " +
             std::to_string(kFrameLimit) + " bytes";
    }
    const size_t payload_bytes = length == kEnd ? 0 : length;
    const size_t num_bytes = sizeof length + payload_bytes + kMacBytes;
    if (here < num_bytes) return "";
    if (!is_frame(next_, frame, payload_bytes)) return explain(frame, payload_bytes);
    if (length == kEnd) {
      if (here > num_bytes) return peer_ + " has sent something after the end of its frames";
      at_end_ = true;
      return "";
    }
    ++next_;
    num_verified_ += num_bytes;
  }
}

// True if this is the sender's frame of that number.
bool Opener::is_frame(uint64_t number, const char* frame, size_t payload_bytes) {
  return is_mac_of(&mac_, number, frame, sizeof(Length) + payload_bytes);
}

// Returns why this is not the next frame.
std::string Opener::explain(const char* frame, size_t payload_bytes) {
  constexpr size_t kShort = size_t{64} << 10;  // so that an attacker cannot make this expensive
  if (payload_bytes > kShort) return wrong_mac("frame", next_, peer_);
  return explain_frame("frame", next_, peer_, [&](uint64_t number) { return is_frame(number, frame, payload_bytes); });
}

Status Opener::close() const {
  if (!failure_.ok() || at_end_) return failure_;
  if (bytes_.size() > num_verified_) {
    return Status(HVL_JOB_BROKEN, peer_ + " has closed its connection in the middle of " + name_of(next_));
  }
  return Status(HVL_JOB_BROKEN,
                peer_ + " has closed its connection without a word: its process has ended or was killed");
}

bool Opener::receive(std::string* payload) {
  if (!has_frame()) return false;
  Length length;
  std::memcpy(&length, bytes_.data(), sizeof length);
  payload->assign(bytes_.data() + sizeof length, length);
  const size_t num_bytes = sizeof length + length + kMacBytes;
  bytes_.drop(num_bytes);
  num_verified_ -= num_bytes;
  return true;
}

}  // namespace hvl
