#include "transport/tcp/sealed_data.h"

#include <cstring>

namespace hvl {

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "frames need byte swaps here");

uint64_t of_header(uint64_t frame) { return 2 * frame; }
uint64_t of_payload(uint64_t frame) { return 2 * frame + 1; }

}  // namespace

void DataSealer::seal(const Transfer& sent) {
  frame_.resize(kDataFrame);
  char* payload = frame_.data() + kDataHeader;
  payload_bytes_ = sent.copy_out(payload, kDataPayload);
  const uint32_t length = static_cast<uint32_t>(payload_bytes_);
  std::memcpy(frame_.data(), &length, sizeof length);
  std::memcpy(frame_.data() + sizeof length, mac_of(&mac_, of_header(next_), frame_.data(), sizeof length).data(),
              kMacBytes);
  std::memcpy(payload + payload_bytes_, mac_of(&mac_, of_payload(next_), payload, payload_bytes_).data(), kMacBytes);
  ++next_;
  begin_ = 0;
  end_ = kDataHeader + payload_bytes_ + kMacBytes;
}

char* DataOpener::room(size_t* num_bytes) {
  bytes_.resize(2 * kDataFrame);  // so that one system call can read the rest of a frame and the next frame
  if (begin_ == end_ || bytes_.size() - begin_ < kDataFrame) {
    std::memmove(bytes_.data(), bytes_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  *num_bytes = bytes_.size() - end_;
  return bytes_.data() + end_;
}

Status DataOpener::open(Transfer* received) {
  while (failure_.ok() && !received->is_empty()) {
    if (num_verified_ == 0) {
      const std::string flaw = verify();
      if (!flaw.empty()) failure_ = Status(HVL_JOB_BROKEN, flaw);
      if (num_verified_ == 0) break;
    }
    const size_t moved = received->fill(bytes_.data() + begin_, num_verified_);
    begin_ += moved;
    num_verified_ -= moved;
    if (num_verified_ == 0) begin_ += kMacBytes;
  }
  return failure_;
}

std::string DataOpener::verify() {
  const char* frame = bytes_.data() + begin_;
  const size_t here = end_ - begin_;
  if (here < kDataHeader) return "";
  if (length_ == 0) {
    const std::string flaw = verify_header(frame);
    if (!flaw.empty()) return flaw;
  }
  if (here < kDataHeader + length_ + kMacBytes) return "";
  if (!is_mac_of(&mac_, of_payload(next_), frame + kDataHeader, length_))
    return wrong_mac(kDataFrameName, next_, peer_);
  ++next_;
  begin_ += kDataHeader;
  num_verified_ = length_;
  length_ = 0;
  return "";
}

std::string DataOpener::verify_header(const char* frame) {
  const auto is_header = [&](uint64_t number) { return is_mac_of(&mac_, of_header(number), frame, sizeof(uint32_t)); };
  if (!is_header(next_)) return explain_frame(kDataFrameName, next_, peer_, is_header);
  uint32_t length;
  std::memcpy(&length, frame, sizeof length);
  if (length == 0 || length > kDataPayload) {
    return "a data frame of " + std::to_string(length) + " bytes from " + peer_ + " is none that is made here";
  }
  length_ = length;
  return "";
}

}  // namespace hvl
