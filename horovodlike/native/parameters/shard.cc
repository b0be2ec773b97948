#include "parameters/shard.h"

#include <algorithm>
#include <string>

namespace hvl {

Shard::Shard(DataType dtype, uint64_t count)
    : dtype_(dtype),
      count_(count),
      values_(new char[count * size_of(dtype)]()),
      blocks_((count + kBlockElements - 1) / kBlockElements) {}

Status Shard::check_range(uint64_t offset, uint64_t count) const {
  if (offset <= count_ && count <= count_ - offset) return Status();
  return Status(HVL_INVALID_ARGUMENT, std::to_string(count) + " elements from " + std::to_string(offset) +
                                          " on are not in a shard of " + std::to_string(count_));
}

Status Shard::apply(const Update& update, uint64_t offset, uint64_t count, const char* pushed) {
  Status status = check_range(offset, count);
  if (status.ok()) status = check(update, dtype_);
  while (status.ok() && count > 0) {
    const uint64_t in_block = std::min(count, kBlockElements - offset % kBlockElements);
    apply_in_block(update, offset, in_block, pushed);
    offset += in_block;
    count -= in_block;
    if (pushed != nullptr) pushed += in_block * size_of(dtype_);
  }
  return status;
}

void Shard::apply_in_block(const Update& update, uint64_t offset, uint64_t count, const char* pushed) {
  const uint64_t width = size_of(dtype_);
  Block& block = blocks_[offset / kBlockElements];
  if (update.rule == Rule::kAdam) ++block.num_updates;
  Elements elements{dtype_, values_.get() + offset * width, {}, block.num_updates, count};
  for (int slot = 0; slot < num_slots(update.rule); ++slot) {
    std::unique_ptr<char[]>& memory = block.slots[slot];
    if (memory == nullptr) memory.reset(new char[kBlockElements * width]());
    elements.slots[slot] = memory.get() + offset % kBlockElements * width;
  }
  hvl::apply(update, pushed, elements);
}

}  // namespace hvl
