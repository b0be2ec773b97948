// The tensors that the coordinator knows, by id: the ranks that have each ready, and the order of last use.
//
// Ids are assigned in ascending order, and a tensor's place in the table is its id modulo the table's size, so that
// finding it takes one load and no hashing. An id whose place is taken by an older tensor that is still known is
// skipped. So memory follows the number of known tensors, although unnamed operations use new names without end; and an
// id is assigned again only after the 32-bit counter has wrapped around, far later than any message is under way.
// (Reusing places with a generation in the upper bits would assign an id again after a few thousand uses of one place,
// fewer than a rank may have in flight.)
#pragma once

#include <cstdint>
#include <vector>

#include "negotiate/message.h"
#include "negotiate/rank_set.h"
#include "negotiate/straggler_stats.h"
#include "negotiate/validate.h"

namespace hvl {

constexpr TensorId kNoId = 0;

// The data of a tensor that on_ready() and the batching of known tensors touch: one cache line.
struct TensorState {
  TensorId id = kNoId;
  int32_t num_ready = 0;
  int32_t num_needed = 0;  // ranks that must be ready
  int32_t process_set = 0;
  Kind kind = HVL_ALLREDUCE;
  Device device = HVL_CPU;
  bool defined = false;    // the log has defined the id
  bool requested = false;  // a rank that has it ready sent its signature in full
  bool fuses = false;      // can be executed together with others
  uint8_t transport = 0;   // an hvl_transport; only of tensors that fuse
  int32_t num_tensors = 0;
  int64_t num_bytes = 0;
  uint64_t since = 0;            // when the first rank had it ready
  ReadyMark last;                // when the last rank so far had it ready
  TensorId less_recent = kNoId;  // neighbours in the order of last use; defined tensors only
  TensorId more_recent = kNoId;
};

static_assert(sizeof(TensorState) == 64);

// The data of a tensor that only definitions and errors need.
struct Details {
  Signature signature;           // as defined; until then, as the first rank requested it
  std::vector<int64_t> varying;  // as defined, laid out as in Record
  uint32_t varying_per_rank = 0;
  std::vector<Proposal> proposals;
};

class TensorTable {
 public:
  explicit TensorTable(int num_ranks, TensorId first_id = 1);

  // Null if the id is not defined (any more).
  TensorState* find(TensorId id) {
    TensorState& tensor = tensors_[id & mask_];
    return tensor.id == id && id != kNoId ? &tensor : nullptr;
  }
  // True if the id may have been assigned before.
  bool was_given(TensorId id) const { return id != kNoId && (wrapped_ || id < next_id_); }
  // Adds a tensor with a new id. Moves all tensors in memory when the table grows.
  TensorState* add();
  void remove(TensorState* tensor);
  Details& details(const TensorState& tensor) { return details_[tensor.id & mask_]; }
  const Details& details(const TensorState& tensor) const { return details_[tensor.id & mask_]; }

  // False if the rank was ready already.
  bool add_ready(TensorState* tensor, int rank) {
    uint64_t& word = ready_[(tensor->id & mask_) * words_per_tensor_ + static_cast<size_t>(rank) / 64];
    const uint64_t bit = uint64_t{1} << (rank % 64);
    if ((word & bit) != 0) return false;
    word |= bit;
    ++tensor->num_ready;
    return true;
  }
  // Marks all `ranks` as ready, and returns -1; if any was ready already, returns the lowest such rank.
  int32_t add_ready(TensorState* tensor, const RankSet& ranks);
  bool is_ready(const TensorState& tensor, int rank) const {
    return (ready_[(tensor.id & mask_) * words_per_tensor_ + static_cast<size_t>(rank) / 64] >> (rank % 64) & 1) != 0;
  }
  void clear_ready(TensorState* tensor);

  // Makes a defined tensor the most recently used.
  void touch(TensorState* tensor);
  // The least recently used of the defined tensors, and the one used next after `tensor`; null at the end.
  TensorState* least_recent() { return find(least_recent_); }
  TensorState* more_recent(const TensorState& tensor) { return find(tensor.more_recent); }
  size_t num_defined() const { return num_defined_; }

  size_t num_places() const { return tensors_.size(); }
  template <typename F>
  void for_each(F visit) const {
    for (const TensorState& tensor : tensors_) {
      if (tensor.id != kNoId) visit(tensor);
    }
  }

 private:
  void grow();
  void unlink(TensorState* tensor);

  size_t words_per_tensor_;
  TensorId next_id_;
  bool wrapped_ = false;
  size_t mask_;
  size_t num_living_ = 0;
  size_t num_defined_ = 0;
  TensorId least_recent_ = kNoId;
  TensorId most_recent_ = kNoId;
  // By place.
  std::vector<TensorState> tensors_;
  std::vector<Details> details_;
  std::vector<uint64_t> ready_;  // a bit per rank, words_per_tensor_ words per place
};

}  // namespace hvl
