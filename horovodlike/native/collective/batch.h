// A batch: tensors that are moved together, as one stream of bytes.
//
// A batch copies nothing: it is a list of segments, each of which is one tensor's own memory at an offset of the
// stream. Segments start at multiples of kAlignment, so cutting the stream at any such multiple cuts no element.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "collective/reduce/reduce.h"

namespace hvl {

constexpr uint64_t kAlignment = 64;

constexpr uint64_t align(uint64_t bytes) { return round_up(bytes, kAlignment); }

// The bytes that one round moves of each of `num_blocks` blocks, the longest of `longest` bytes, that share a buffer.
// Has a lower bound: a large number of blocks may need more than `buffer_bytes`.
constexpr uint64_t share_of_each(uint64_t buffer_bytes, uint64_t num_blocks, uint64_t longest) {
  constexpr uint64_t kLeast = 4096;
  return std::min(longest, std::max(kLeast, buffer_bytes / num_blocks / kAlignment * kAlignment));
}

struct Segment {
  const char* input;
  char* output;
  uint64_t offset;  // in the stream
  uint64_t num_bytes;
  Reduction reduction;
};

class Batch {
 public:
  void clear() {
    segments_.clear();
    num_bytes_ = 0;
    interrupted_from_ = UINT64_MAX;
  }

  void add(const char* input, char* output, uint64_t num_bytes, const Reduction& reduction) {
    segments_.push_back(Segment{input, output, num_bytes_, num_bytes, reduction});
    num_bytes_ += align(num_bytes);
  }

  // Calls `interrupt` before each visit, from the middle of the stream on (fault injection).
  void interrupt_halfway(std::function<void()> interrupt) {
    interrupted_from_ = num_bytes_ / 2;
    interrupt_ = std::move(interrupt);
  }

  const std::vector<Segment>& segments() const { return segments_; }
  // Length of the stream.
  uint64_t num_bytes() const { return num_bytes_; }

  // Calls visit(segment, offset in the segment, offset in the range, bytes) for each piece of [begin, end).
  template <typename Visit>
  void for_each_piece(uint64_t begin, uint64_t end, Visit&& visit) const {
    if (end > interrupted_from_) interrupt_();
    auto segment = std::partition_point(segments_.begin(), segments_.end(), [begin](const Segment& candidate) {
      return candidate.offset + candidate.num_bytes <= begin;
    });
    for (; segment != segments_.end() && segment->offset < end; ++segment) {
      uint64_t from = std::max(segment->offset, begin);
      uint64_t to = std::min(segment->offset + segment->num_bytes, end);
      if (from < to) visit(*segment, from - segment->offset, from - begin, to - from);
    }
  }

 private:
  std::vector<Segment> segments_;
  uint64_t num_bytes_ = 0;
  uint64_t interrupted_from_ = UINT64_MAX;
  std::function<void()> interrupt_;
};

}  // namespace hvl
