// Buffers for elements under way: reused, since memory from the system is costly to touch for the first time.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace hvl {

// Not thread-safe.
class BufferPool {
 public:
  // Returns the memory to its pool, which must live longer. Without one, the memory was borrowed.
  class GiveBack {
   public:
    GiveBack() = default;
    GiveBack(BufferPool* pool, size_t size_class) : pool_(pool), class_(size_class) {}
    void operator()(char* memory) const {
      if (pool_ != nullptr) pool_->give_back(memory, class_);
    }

   private:
    BufferPool* pool_ = nullptr;
    size_t class_ = 0;
  };
  using Pointer = std::unique_ptr<char, GiveBack>;

  BufferPool() = default;
  ~BufferPool() {
    for (std::vector<char*>& unused : unused_) {
      for (char* memory : unused) std::free(memory);
    }
  }
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  // Returns at least `num_bytes` bytes, not initialised. Throws std::bad_alloc.
  Pointer take(size_t num_bytes) {
    size_t size_class = 0;
    while (kLeastBytes << size_class < num_bytes) ++size_class;
    if (size_class >= unused_.size()) unused_.resize(size_class + 1);
    std::vector<char*>& unused = unused_[size_class];
    char* memory = nullptr;
    if (unused.empty()) {
      memory = static_cast<char*>(std::aligned_alloc(kLeastBytes, kLeastBytes << size_class));
      if (memory == nullptr) throw std::bad_alloc();
    } else {
      memory = unused.back();
      unused.pop_back();
    }
    return Pointer(memory, GiveBack(this, size_class));
  }

 private:
  static constexpr size_t kLeastBytes = 4096;
  static constexpr size_t kMostUnused = 16;  // unused buffers of one size

  void give_back(char* memory, size_t size_class) {
    std::vector<char*>& unused = unused_[size_class];
    if (unused.size() < kMostUnused) return unused.push_back(memory);
    std::free(memory);
  }

  std::vector<std::vector<char*>> unused_;  // by size
};

}  // namespace hvl
