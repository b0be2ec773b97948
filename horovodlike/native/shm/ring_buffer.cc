#include "shm/ring_buffer.h"

#include <algorithm>
#include <cstring>

namespace hvl {

namespace {

using Length = uint32_t;

// Copies `count` bytes between linear memory and the ring at stream position `position`, which may wrap around.
template <typename Copy>
void for_each_run(uint64_t position, size_t count, size_t capacity, Copy&& copy) {
  size_t start = static_cast<size_t>(position) & (capacity - 1);
  size_t first = std::min(count, capacity - start);
  copy(start, size_t{0}, first);
  if (first < count) copy(size_t{0}, first, count - first);
}

}  // namespace

uint64_t RingBufferWriter::send(const std::string& frame) {
  Length length = static_cast<Length>(frame.size());
  outbox_.append(reinterpret_cast<const char*>(&length), sizeof length);
  outbox_.append(frame);
  return written_->load(std::memory_order_relaxed) + outbox_.size() - sent_;
}

size_t RingBufferWriter::room() const {
  uint64_t written = written_->load(std::memory_order_relaxed);
  uint64_t slowest = written;
  for (auto* reader : readers_) slowest = std::min(slowest, reader->load());
  return capacity_ - static_cast<size_t>(written - slowest);
}

bool RingBufferWriter::pump() {
  if (is_flushed()) return false;
  size_t count = std::min(room(), outbox_.size() - sent_);
  if (count == 0) return false;
  uint64_t written = written_->load(std::memory_order_relaxed);
  for_each_run(written, count, capacity_, [&](size_t in_ring, size_t in_run, size_t length) {
    memcpy(bytes_ + in_ring, outbox_.data() + sent_ + in_run, length);
  });
  sent_ += count;
  if (is_flushed()) {
    outbox_.clear();
    sent_ = 0;
  }
  written_->store(written + count);
  return true;
}

bool RingBufferReader::frame_is_here() const {
  Length length;
  if (inbox_.size() - parsed_ < sizeof length) return false;
  memcpy(&length, inbox_.data() + parsed_, sizeof length);
  return inbox_.size() - parsed_ - sizeof length >= length;
}

bool RingBufferReader::receive(std::string* frame, bool* freed) {
  uint64_t read = read_->load(std::memory_order_relaxed);
  size_t count = static_cast<size_t>(written_->load() - read);
  if (count > 0) {
    if (parsed_ == inbox_.size()) {
      inbox_.clear();
      parsed_ = 0;
    }
    size_t old_size = inbox_.size();
    inbox_.resize(old_size + count);
    for_each_run(read, count, capacity_, [&](size_t in_ring, size_t in_run, size_t length) {
      memcpy(&inbox_[old_size + in_run], bytes_ + in_ring, length);
    });
    read_->store(read + count);
    *freed = true;
  }
  if (!frame_is_here()) return false;
  Length length;
  memcpy(&length, inbox_.data() + parsed_, sizeof length);
  frame->assign(inbox_, parsed_ + sizeof length, length);
  parsed_ += sizeof length + length;
  return true;
}

}  // namespace hvl
