#include "parameters/shard.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

namespace hvl {

namespace {

constexpr uint64_t kAlignment = 64;  // the values': no vector is in two cache lines

// Memory of zeros, which the system provides only where it is used, and where it can be aligned.
char* make_zeros(uint64_t count, uint64_t width) {
  void* memory = std::calloc(count + kAlignment / width, width);
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<char*>(memory);
}

}  // namespace

Shard::Shard(DataType dtype, uint64_t count)
    : dtype_(dtype),
      count_(count),
      memory_(make_zeros(count, size_of(dtype))),
      values_(memory_.get() + -reinterpret_cast<uintptr_t>(memory_.get()) % kAlignment),
      blocks_((count + kBlockElements - 1) / kBlockElements) {}

Status Shard::check_range(const Range& range, Part part) const {
  const uint64_t most = count_of(part);
  if (range.offset <= most && range.count <= most - range.offset) return Status();
  return Status(HVL_INVALID_ARGUMENT, std::to_string(range.count) + " elements from " + std::to_string(range.offset) +
                                          " on are not in a shard of " + std::to_string(most));
}

template <typename Function>
void Shard::for_each_block(const Range& range, Function&& function) const {
  const uint64_t width = size_of(dtype_), end = range.offset + range.count;
  for (uint64_t offset = range.offset; offset < end;) {
    const uint64_t count = std::min(end - offset, kBlockElements - offset % kBlockElements);
    function(static_cast<size_t>(offset / kBlockElements), Range{offset, count}, (offset - range.offset) * width);
    offset += count;
  }
}

Status Shard::apply(const Update& update, const std::vector<Range>& ranges, const char* pushed, const UserRules& user) {
  Status status = check(update, dtype_);
  for (const Range& range : ranges) {
    if (status.ok()) status = check_range(range);
  }
  ++num_applied_;
  for (const Range& range : ranges) {
    if (!status.ok()) break;
    const uint64_t width = size_of(dtype_);
    if (update.rule == Rule::kNamed) {
      status = user.apply(update, dtype_, values_ + range.offset * width, pushed, range.count);
    } else {
      for_each_block(range, [&](size_t, const Range& part, uint64_t in_front) {
        apply_in_block(update, part, pushed == nullptr ? nullptr : pushed + in_front);
      });
    }
    if (pushed != nullptr) pushed += range.count * width;
  }
  return status;
}

char* Shard::slot_of(size_t block, int slot) {
  std::unique_ptr<char[]>& memory = blocks_[block].slots[slot];
  const uint64_t count = std::min(kBlockElements, count_ - block * kBlockElements);
  if (memory == nullptr) memory.reset(new char[count * size_of(dtype_)]());
  return memory.get();
}

void Shard::apply_in_block(const Update& update, const Range& range, const char* pushed) {
  const uint64_t width = size_of(dtype_), in_front = range.offset % kBlockElements * width;
  const size_t index = range.offset / kBlockElements;
  Block& block = blocks_[index];
  if (update.rule == Rule::kAdam && block.counted != num_applied_) {
    ++block.num_updates;
    block.counted = num_applied_;
  }
  Elements elements{dtype_, values_ + range.offset * width, {}, block.num_updates, range.count};
  for (int slot = 0; slot < num_slots(update.rule); ++slot) elements.slots[slot] = slot_of(index, slot) + in_front;
  hvl::apply(update, pushed, elements);
}

void Shard::read(Part part, const Range& range, char* to) const {
  const uint64_t width = width_of(part);
  if (part == Part::kValues) {
    copy_bytes(values_ + range.offset * width, to, range.count * width);
  } else if (part == Part::kUpdates) {
    std::memcpy(to, &num_applied_, range.count * width);
  } else if (part == Part::kCounters) {
    for (uint64_t index = 0; index < range.count; ++index) {
      std::memcpy(to + index * width, &blocks_[range.offset + index].num_updates, width);
    }
  } else {
    for_each_block(range, [&](size_t block, const Range& each, uint64_t in_front) {
      const char* slot = blocks_[block].slots[part == Part::kSlot0 ? 0 : 1].get();
      if (slot == nullptr) {
        std::memset(to + in_front, 0, each.count * width);
      } else {
        std::memcpy(to + in_front, slot + each.offset % kBlockElements * width, each.count * width);
      }
    });
  }
}

void Shard::write(Part part, const Range& range, const char* from) {
  if (part == Part::kUpdates) return;
  const uint64_t width = width_of(part);
  if (part == Part::kValues) {
    std::memcpy(values_ + range.offset * width, from, range.count * width);
  } else if (part == Part::kCounters) {
    for (uint64_t index = 0; index < range.count; ++index) {
      std::memcpy(&blocks_[range.offset + index].num_updates, from + index * width, width);
    }
  } else {
    for_each_block(range, [&](size_t block, const Range& each, uint64_t in_front) {
      char* slot = slot_of(block, part == Part::kSlot0 ? 0 : 1);
      std::memcpy(slot + each.offset % kBlockElements * width, from + in_front, each.count * width);
    });
  }
}

}  // namespace hvl
