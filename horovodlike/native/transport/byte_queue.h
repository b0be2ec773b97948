// Queues of bytes for one direction of a connection: ByteQueue copies the bytes, Transfer borrows their memory.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hvl {

// A queue of bytes that are contiguous in memory, so that one system call or hash takes all of them.
class ByteQueue {
 public:
  const char* data() const { return bytes_.data() + begin_; }
  size_t size() const { return bytes_.size() - begin_; }
  bool empty() const { return size() == 0; }

  void append(const void* bytes, size_t count) {
    if (begin_ > size()) {  // then fewer bytes are moved than were dropped since the last move
      bytes_.erase(0, begin_);
      begin_ = 0;
    }
    bytes_.append(static_cast<const char*>(bytes), count);
  }

  // Removes the first `count` bytes.
  void drop(size_t count) {
    begin_ += count;
    if (empty()) clear();
  }

  void clear() {
    constexpr size_t kKept = size_t{1} << 18;
    if (bytes_.capacity() > kKept) bytes_ = std::string();  // one long frame must not hold memory forever
    bytes_.clear();
    begin_ = 0;
  }

 private:
  std::string bytes_;
  size_t begin_ = 0;
};

// Memory of collectives and messages to send or to receive into. Positions count the bytes of the direction from its
// beginning.
class Transfer {
 public:
  // Queues memory, and returns the position of its end.
  uint64_t add(void* data, uint64_t num_bytes);
  bool is_empty() const { return moved_ == queued_; }
  uint64_t moved() const { return moved_; }
  uint64_t num_bytes_left() const { return queued_ - moved_; }
  // The next pieces, for one system call.
  iovec* next() { return &pieces_[first_]; }
  size_t count() const;
  uint64_t num_bytes_of(size_t count) const;
  void advance(uint64_t num_bytes);
  // Copies the next bytes, at most `most`, and returns how many. They count as moved only after advance().
  size_t copy_out(char* to, size_t most) const;
  // Moves as many bytes as fit into the next pieces, and returns how many.
  size_t fill(const char* from, size_t num_bytes);

 private:
  std::vector<iovec> pieces_;
  size_t first_ = 0;
  uint64_t queued_ = 0;
  uint64_t moved_ = 0;
};

}  // namespace hvl
