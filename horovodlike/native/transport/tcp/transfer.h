// Memory of collectives to send or to receive into, in one direction of a connection.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hvl {

// Positions count the bytes of one direction from its beginning.
class Transfer {
 public:
  // Returns the position of its end.
  uint64_t add(void* data, uint64_t num_bytes);
  bool is_empty() const { return moved_ == queued_; }
  uint64_t moved() const { return moved_; }
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
