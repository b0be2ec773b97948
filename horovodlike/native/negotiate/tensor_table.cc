#include "negotiate/tensor_table.h"

#include <algorithm>

namespace hvl {
namespace {

constexpr size_t kFirstPlaces = 256;

}  // namespace

TensorTable::TensorTable(int num_ranks, TensorId first_id)
    : words_per_tensor_((static_cast<size_t>(num_ranks) + 63) / 64),
      next_id_(first_id),
      mask_(kFirstPlaces - 1),
      tensors_(kFirstPlaces),
      details_(kFirstPlaces),
      ready_(kFirstPlaces * words_per_tensor_) {}

TensorState* TensorTable::add() {
  // Half of the places stay free, so that few ids are skipped.
  if (2 * (num_living_ + 1) > tensors_.size()) grow();
  while (next_id_ == kNoId || tensors_[next_id_ & mask_].id != kNoId) {
    if (++next_id_ == kNoId) wrapped_ = true;
  }
  TensorState* tensor = &tensors_[next_id_ & mask_];
  tensor->id = next_id_;
  if (++next_id_ == kNoId) wrapped_ = true;
  ++num_living_;
  return tensor;
}

void TensorTable::remove(TensorState* tensor) {
  clear_ready(tensor);
  if (tensor->defined) unlink(tensor);
  details(*tensor) = Details();
  *tensor = TensorState();
  --num_living_;
}

int32_t TensorTable::add_ready(TensorState* tensor, const RankSet& ranks) {
  uint64_t* words = &ready_[(tensor->id & mask_) * words_per_tensor_];
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
  tensor->num_ready += ranks.size();
  return -1;
}

void TensorTable::clear_ready(TensorState* tensor) {
  const size_t first = (tensor->id & mask_) * words_per_tensor_;
  std::fill_n(ready_.begin() + static_cast<std::ptrdiff_t>(first), words_per_tensor_, 0);
  tensor->num_ready = 0;
}

void TensorTable::touch(TensorState* tensor) {
  if (tensor->id == most_recent_) return;
  if (tensor->less_recent != kNoId || tensor->more_recent != kNoId) unlink(tensor);
  tensor->less_recent = most_recent_;
  if (TensorState* neighbour = find(most_recent_)) {
    neighbour->more_recent = tensor->id;
  } else {
    least_recent_ = tensor->id;
  }
  most_recent_ = tensor->id;
  ++num_defined_;
}

void TensorTable::unlink(TensorState* tensor) {
  TensorState* less = find(tensor->less_recent);
  TensorState* more = find(tensor->more_recent);
  (less != nullptr ? less->more_recent : least_recent_) = tensor->more_recent;
  (more != nullptr ? more->less_recent : most_recent_) = tensor->less_recent;
  tensor->less_recent = tensor->more_recent = kNoId;
  --num_defined_;
}

// Doubles the table. Ids that differ modulo the old size differ modulo the new one, so no two tensors share a place.
void TensorTable::grow() {
  const size_t new_mask = 2 * tensors_.size() - 1;
  std::vector<TensorState> tensors(new_mask + 1);
  std::vector<Details> details(new_mask + 1);
  std::vector<uint64_t> ready((new_mask + 1) * words_per_tensor_);
  for (size_t place = 0; place < tensors_.size(); ++place) {
    if (tensors_[place].id == kNoId) continue;
    const size_t to = tensors_[place].id & new_mask;
    tensors[to] = tensors_[place];
    details[to] = std::move(details_[place]);
    for (size_t w = 0; w < words_per_tensor_; ++w)
      ready[to * words_per_tensor_ + w] = ready_[place * words_per_tensor_ + w];
  }
  tensors_.swap(tensors);
  details_.swap(details);
  ready_.swap(ready);
  mask_ = new_mask;
}

}  // namespace hvl
