#include "negotiate/tensor_table.h"

#include <algorithm>

namespace hvl {
namespace {

constexpr size_t kFirstPlaces = 256;

}  // namespace

TensorTable::TensorTable(int num_ranks, TensorId first_id)
    : words_per_entry_((static_cast<size_t>(num_ranks) + 63) / 64),
      next_id_(first_id),
      mask_(kFirstPlaces - 1),
      entries_(kFirstPlaces),
      details_(kFirstPlaces),
      ready_(kFirstPlaces * words_per_entry_) {}

TensorState* TensorTable::add() {
  // Half of the places stay free, so that few ids are skipped.
  if (2 * (num_living_ + 1) > entries_.size()) grow();
  while (next_id_ == kNoId || entries_[next_id_ & mask_].id != kNoId) {
    if (++next_id_ == kNoId) wrapped_ = true;
  }
  TensorState* entry = &entries_[next_id_ & mask_];
  entry->id = next_id_;
  if (++next_id_ == kNoId) wrapped_ = true;
  ++num_living_;
  return entry;
}

void TensorTable::remove(TensorState* entry) {
  clear_ready(entry);
  if (entry->defined) unlink(entry);
  details(*entry) = Details();
  *entry = TensorState();
  --num_living_;
}

int32_t TensorTable::add_ready(TensorState* entry, const RankSet& ranks) {
  uint64_t* words = &ready_[(entry->id & mask_) * words_per_entry_];
  for (const RankRange& range : ranks.ranges()) {
    const int32_t first = range.first / 64;
    const int32_t last = range.last / 64;
    for (int32_t w = first; w <= last; ++w) {
      uint64_t bits = ~uint64_t{0};
      if (w == first) bits &= ~uint64_t{0} << (range.first % 64);
      if (w == last) bits &= ~uint64_t{0} >> (63 - range.last % 64);
      const uint64_t before = words[w] & bits;
      if (before != 0) return 64 * w + __builtin_ctzll(before);
      words[w] |= bits;
    }
  }
  entry->num_ready += ranks.size();
  return -1;
}

void TensorTable::clear_ready(TensorState* entry) {
  const size_t first = (entry->id & mask_) * words_per_entry_;
  std::fill_n(ready_.begin() + static_cast<std::ptrdiff_t>(first), words_per_entry_, 0);
  entry->num_ready = 0;
}

void TensorTable::touch(TensorState* entry) {
  if (entry->id == most_recent_) return;
  if (entry->less_recent != kNoId || entry->more_recent != kNoId) unlink(entry);
  entry->less_recent = most_recent_;
  if (TensorState* neighbour = find(most_recent_)) {
    neighbour->more_recent = entry->id;
  } else {
    least_recent_ = entry->id;
  }
  most_recent_ = entry->id;
  ++num_defined_;
}

void TensorTable::unlink(TensorState* entry) {
  TensorState* less = find(entry->less_recent);
  TensorState* more = find(entry->more_recent);
  (less != nullptr ? less->more_recent : least_recent_) = entry->more_recent;
  (more != nullptr ? more->less_recent : most_recent_) = entry->less_recent;
  entry->less_recent = entry->more_recent = kNoId;
  --num_defined_;
}

// Ids that differ modulo the old size differ modulo the new one: no two entries meet in a place.
void TensorTable::grow() {
  const size_t new_mask = 2 * entries_.size() - 1;
  std::vector<TensorState> entries(new_mask + 1);
  std::vector<Details> details(new_mask + 1);
  std::vector<uint64_t> ready((new_mask + 1) * words_per_entry_);
  for (size_t place = 0; place < entries_.size(); ++place) {
    if (entries_[place].id == kNoId) continue;
    const size_t to = entries_[place].id & new_mask;
    entries[to] = entries_[place];
    details[to] = std::move(details_[place]);
    for (size_t w = 0; w < words_per_entry_; ++w)
      ready[to * words_per_entry_ + w] = ready_[place * words_per_entry_ + w];
  }
  entries_.swap(entries);
  details_.swap(details);
  ready_.swap(ready);
  mask_ = new_mask;
}

}  // namespace hvl
