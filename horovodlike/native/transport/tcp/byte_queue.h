// Bytes in at the end, out at the front; in one piece, so that a system call or a hash takes all of them at once.
#pragma once

#include <cstddef>
#include <string>

namespace hvl {

class ByteQueue {
 public:
  const char* data() const { return bytes_.data() + begin_; }
  size_t size() const { return bytes_.size() - begin_; }
  bool empty() const { return size() == 0; }

  void append(const void* bytes, size_t count) {
    if (begin_ > size()) {  // so that the bytes moved are fewer than those taken out since
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
    if (bytes_.capacity() > kKept) bytes_ = std::string();  // one long frame does not hold memory forever
    bytes_.clear();
    begin_ = 0;
  }

 private:
  std::string bytes_;
  size_t begin_ = 0;
};

}  // namespace hvl
