// Memory: buffers that are reused, and memory that is never freed.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace hvl {

// A buffer for temporary data. Its memory is kept for the next use, and not initialised.
class Buffer {
 public:
  // Returns at least `num_bytes` bytes. If the buffer must grow, its contents are lost.
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

// Never frees `memory`: code outside of this library, or a device, may still use it. Any thread.
inline void leak(void* memory) {
  static std::mutex mutex;
  static auto* kept = new std::vector<void*>;  // outlives functions that run at exit
  std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(memory);
}

}  // namespace hvl
