// Frames through a ring buffer in shared memory: one writer, and one or several readers that each read every frame.
//
// The ring is a stream: a frame may be longer than the ring and is then transferred piece by piece.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "base/clock.h"

namespace hvl {

class RingBufferWriter {
 public:
  // `capacity` is a power of two.
  RingBufferWriter(char* bytes, size_t capacity, std::atomic<uint64_t>* written,
                   std::vector<std::atomic<uint64_t>*> readers)
      : bytes_(bytes), capacity_(capacity), written_(written), readers_(std::move(readers)) {}

  // Queues a frame: its length, then its bytes. Returns the position of its end in the stream.
  uint64_t send(const std::string& frame);
  // True if all of the stream up to `end` can be read by the readers.
  bool has_written(uint64_t end) const { return written_->load(std::memory_order_relaxed) >= end; }
  // Copies as much as fits to the ring. True if anything moved: then the caller must notify the readers.
  bool pump();
  bool is_flushed() const { return sent_ == outbox_.size(); }
  // True if pump() would move something.
  bool can_pump() const { return !is_flushed() && room() > 0; }

 private:
  size_t room() const;

  char* bytes_;
  size_t capacity_;
  std::atomic<uint64_t>* written_;
  std::vector<std::atomic<uint64_t>*> readers_;
  std::string outbox_;
  size_t sent_ = 0;  // bytes of outbox_ that are in the ring
};

class RingBufferReader {
 public:
  RingBufferReader(const char* bytes, size_t capacity, std::atomic<uint64_t>* written, std::atomic<uint64_t>* read)
      : bytes_(bytes), capacity_(capacity), written_(written), read_(read) {}

  // True if receive() would find something: at least part of a frame.
  bool has_frame() const { return written_->load() != read_->load() || frame_is_here(); }
  // True if a whole frame has arrived. Sets *freed if reading made room in the ring.
  bool receive(std::string* frame, bool* freed);

 private:
  bool frame_is_here() const;

  const char* bytes_;
  size_t capacity_;
  std::atomic<uint64_t>* written_;
  std::atomic<uint64_t>* read_;
  std::string inbox_;
  size_t parsed_ = 0;  // bytes of inbox_ that receive() has returned
};

// Writes the time of sending in front of a frame: its reader may be asleep, and whether a rank counts as late must not
// depend on when the frame is read.
inline void put_time(std::string* frame) {
  const uint64_t now = now_ns();
  frame->append(reinterpret_cast<const char*>(&now), sizeof now);
}

inline uint64_t take_time(std::string* frame) {
  uint64_t sent = 0;
  if (frame->size() < sizeof sent) return now_ns();  // decode() rejects it
  memcpy(&sent, frame->data(), sizeof sent);
  frame->erase(0, sizeof sent);
  return std::min(sent, now_ns());
}

}  // namespace hvl
