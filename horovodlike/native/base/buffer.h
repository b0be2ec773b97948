// Memory for what is on its way: kept from one use to the next, not initialised.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace hvl {

class Buffer {
 public:
  // At least so many bytes; what was there before is lost if there were fewer.
  char* reserve(size_t num_bytes) {
    if (num_bytes > num_bytes_) {
      num_bytes_ = (num_bytes + kAlign - 1) / kAlign * kAlign;
      data_.reset();
      data_.reset(static_cast<char*>(std::aligned_alloc(kAlign, num_bytes_)));
      if (data_ == nullptr) throw std::bad_alloc();
    }
    return data_.get();
  }

 private:
  static constexpr size_t kAlign = 4096;
  struct Free {
    void operator()(char* data) const { std::free(data); }
  };

  std::unique_ptr<char, Free> data_;
  size_t num_bytes_ = 0;
};

}  // namespace hvl
