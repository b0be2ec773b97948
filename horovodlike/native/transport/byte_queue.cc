#include "transport/byte_queue.h"

#include <algorithm>
#include <cstring>

namespace hvl {

namespace {

constexpr size_t kMaxPieces = 64;          // pieces per system call
constexpr uint64_t kMaxBytes = 512 << 10;  // bytes per system call, so that both directions progress
constexpr size_t kForgetPieces = 256;      // moved pieces after which they are erased

}  // namespace

uint64_t Transfer::add(void* data, uint64_t num_bytes) {
  if (num_bytes == 0) return queued_;
  if (first_ == pieces_.size()) {
    pieces_.clear();
    first_ = 0;
  }
  queued_ += num_bytes;
  const bool has_last = first_ < pieces_.size();
  if (has_last && static_cast<char*>(pieces_.back().iov_base) + pieces_.back().iov_len == data) {
    pieces_.back().iov_len += num_bytes;
  } else {
    pieces_.push_back({data, num_bytes});
  }
  return queued_;
}

size_t Transfer::count() const {
  const size_t most = std::min(kMaxPieces, pieces_.size() - first_);
  size_t count = 0;
  for (uint64_t num_bytes = 0; count < most && num_bytes < kMaxBytes; ++count) {
    num_bytes += pieces_[first_ + count].iov_len;
  }
  return count;
}

uint64_t Transfer::num_bytes_of(size_t count) const {
  uint64_t num_bytes = 0;
  for (size_t index = 0; index < count; ++index) num_bytes += pieces_[first_ + index].iov_len;
  return num_bytes;
}

void Transfer::advance(uint64_t num_bytes) {
  moved_ += num_bytes;
  while (num_bytes > 0) {
    iovec& piece = pieces_[first_];
    const uint64_t part = std::min<uint64_t>(num_bytes, piece.iov_len);
    piece.iov_base = static_cast<char*>(piece.iov_base) + part;
    piece.iov_len -= part;
    num_bytes -= part;
    if (piece.iov_len == 0) ++first_;
  }
  if (first_ >= kForgetPieces) {
    pieces_.erase(pieces_.begin(), pieces_.begin() + static_cast<std::ptrdiff_t>(first_));
    first_ = 0;
  }
}

size_t Transfer::copy_out(char* to, size_t most) const {
  size_t copied = 0;
  for (size_t index = first_; index < pieces_.size() && copied < most; ++index) {
    const size_t part = std::min(most - copied, pieces_[index].iov_len);
    std::memcpy(to + copied, pieces_[index].iov_base, part);
    copied += part;
  }
  return copied;
}

size_t Transfer::fill(const char* from, size_t num_bytes) {
  size_t filled = 0;
  while (filled < num_bytes && !is_empty()) {
    const iovec piece = *next();
    const size_t part = std::min(num_bytes - filled, piece.iov_len);
    std::memcpy(piece.iov_base, from + filled, part);
    filled += part;
    advance(part);
  }
  return filled;
}

}  // namespace hvl
