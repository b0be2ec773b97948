// One server's part of an array of parameters, and the state of the rules for it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "base/status.h"
#include "parameters/rule.h"

namespace hvl {

// A large push is applied in several commands, so that no client waits until the push of another one is complete. A
// command has whole blocks, but for its ends. Each block is updated as a whole, and counts the updates of kAdam by
// itself.
constexpr uint64_t kBlockElements = HVL_PARAMETERS_BLOCK;

// Consecutive elements of a shard.
struct Range {
  uint64_t offset = 0;
  uint64_t count = 0;
};

// The arrays of a shard: its values, the slots of its rules, the counters of its blocks, and one item, the number of
// updates so far, which is only read.
enum class Part : uint8_t { kValues, kSlot0, kSlot1, kCounters, kUpdates };

constexpr bool is_of_counts(Part part) { return part >= Part::kCounters; }

// Not thread-safe.
class Shard {
 public:
  // All elements are 0. Throws std::bad_alloc.
  Shard(DataType dtype, uint64_t count);
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  DataType dtype() const { return dtype_; }
  uint64_t count() const { return count_; }
  const char* values() const { return values_; }
  // The width of an item of the part, and the number of its items.
  uint64_t width_of(Part part) const { return is_of_counts(part) ? sizeof(uint64_t) : size_of(dtype_); }
  uint64_t count_of(Part part) const {
    return part == Part::kUpdates ? 1 : part == Part::kCounters ? blocks_.size() : count_;
  }

  // An error says that the items of this range are not all there.
  Status check_range(const Range& range, Part part = Part::kValues) const;
  // Applies a rule to the elements of the ranges, one after the other. `pushed`: these elements, in the same order. For
  // kAdam it is one update of each block.
  Status apply(const Update& update, const std::vector<Range>& ranges, const char* pushed,
               const UserRules& user = UserRules());
  Status apply(const Update& update, uint64_t offset, uint64_t count, const char* pushed) {
    return apply(update, {Range{offset, count}}, pushed);
  }
  // Copy a range that check_range() has found right.
  void read(Part part, const Range& range, char* to) const;
  void write(Part part, const Range& range, const char* from);

 private:
  struct Block {
    std::unique_ptr<char[]> slots[kMostSlots];  // made when a rule needs them
    uint64_t num_updates = 0;                   // updates by kAdam
    uint64_t counted = 0;                       // the update that was counted last
  };
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  void apply_in_block(const Update& update, const Range& range, const char* pushed);
  char* slot_of(size_t block, int slot);
  // Calls function(block, part of the range, bytes in front of this part).
  template <typename Function>
  void for_each_block(const Range& range, Function&& function) const;

  const DataType dtype_;
  const uint64_t count_;
  const std::unique_ptr<char, Free> memory_;
  char* const values_;
  std::vector<Block> blocks_;
  uint64_t num_applied_ = 0;
};

}  // namespace hvl
