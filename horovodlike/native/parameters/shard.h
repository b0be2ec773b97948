// One server's part of an array of parameters, and what the rules remember of it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "parameters/rule.h"

namespace hvl {

// A large push is applied in pieces, so that no client waits until that of another one is complete. A piece lies within
// one block. Each block is updated as a whole, and counts the updates of kAdam by itself.
constexpr uint64_t kBlockElements = uint64_t{64} << 10;

// For one thread.
class Shard {
 public:
  // All elements are 0.
  Shard(DataType dtype, uint64_t count);
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  DataType dtype() const { return dtype_; }
  uint64_t count() const { return count_; }
  const char* values() const { return values_.get(); }

  // An error says that the elements [offset, offset + count) are not all there.
  Status check_range(uint64_t offset, uint64_t count) const;
  // Applies a rule to the elements [offset, offset + count). `pushed`: these elements, one after the other.
  Status apply(const Update& update, uint64_t offset, uint64_t count, const char* pushed);

 private:
  struct Block {
    std::unique_ptr<char[]> slots[kMostSlots];  // made when a rule needs them
    uint64_t num_updates = 0;                   // by kAdam
  };

  void apply_in_block(const Update& update, uint64_t offset, uint64_t count, const char* pushed);

  const DataType dtype_;
  const uint64_t count_;
  const std::unique_ptr<char[]> values_;
  std::vector<Block> blocks_;
};

}  // namespace hvl
