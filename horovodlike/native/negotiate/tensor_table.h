// The tensors that the coordinator knows, by id: the ranks that have each ready, and the order of last use.
//
// Ids are assigned in ascending order and an entry's place is its id modulo the size of the table, so that finding it
// takes one load and no hashing. An id whose place is taken by an older, still living entry is skipped. So memory
// follows the number of living entries although unnamed operations use up names without end; and an id comes back only
// after the 32-bit counter has gone round once, far longer than any message is under way. (Reusing places with a
// generation in the upper bits would bring an id back after a few thousand uses of one place, fewer than a rank may
// have in flight.)
#pragma once

#include <cstdint>
#include <vector>

#include "negotiate/message.h"
#include "negotiate/rank_set.h"
#include "negotiate/straggler_stats.h"
#include "negotiate/validate.h"

namespace hvl {

constexpr TensorId kNoId = 0;

// The data that on_ready() and the batching of known tensors touch: one cache line.
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
  int32_t num_tensors = 0;
  int64_t num_bytes = 0;
  uint64_t since = 0;            // when the first rank had it ready
  ReadyMark last;                // when the last rank so far had it ready
  TensorId less_recent = kNoId;  // neighbours in the order of last use; defined entries only
  TensorId more_recent = kNoId;
};

static_assert(sizeof(TensorState) == 64);

// The data that only definitions and errors need.
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
    TensorState& entry = entries_[id & mask_];
    return entry.id == id && id != kNoId ? &entry : nullptr;
  }
  // True if the id may have been assigned before.
  bool was_given(TensorId id) const { return id != kNoId && (wrapped_ || id < next_id_); }
  // Moves all entries when the table grows.
  TensorState* add();
  void remove(TensorState* entry);
  Details& details(const TensorState& entry) { return details_[entry.id & mask_]; }
  const Details& details(const TensorState& entry) const { return details_[entry.id & mask_]; }

  // False if the rank was ready already.
  bool add_ready(TensorState* entry, int rank) {
    uint64_t& word = ready_[(entry->id & mask_) * words_per_entry_ + static_cast<size_t>(rank) / 64];
    const uint64_t bit = uint64_t{1} << (rank % 64);
    if ((word & bit) != 0) return false;
    word |= bit;
    ++entry->num_ready;
    return true;
  }
  // Adds all of them, unless one was ready already: returns the lowest such rank, else -1.
  int32_t add_ready(TensorState* entry, const RankSet& ranks);
  bool is_ready(const TensorState& entry, int rank) const {
    return (ready_[(entry.id & mask_) * words_per_entry_ + static_cast<size_t>(rank) / 64] >> (rank % 64) & 1) != 0;
  }
  void clear_ready(TensorState* entry);

  // Makes a defined entry the most recently used one.
  void touch(TensorState* entry);
  // The least recently used of the defined entries, and the next one after `entry`; null at the end.
  TensorState* least_recent() { return find(least_recent_); }
  TensorState* more_recent(const TensorState& entry) { return find(entry.more_recent); }
  size_t num_defined() const { return num_defined_; }

  size_t num_places() const { return entries_.size(); }
  template <typename F>
  void for_each(F visit) const {
    for (const TensorState& entry : entries_) {
      if (entry.id != kNoId) visit(entry);
    }
  }

 private:
  void grow();
  void unlink(TensorState* entry);

  size_t words_per_entry_;
  TensorId next_id_;
  bool wrapped_ = false;
  size_t mask_;
  size_t num_living_ = 0;
  size_t num_defined_ = 0;
  TensorId least_recent_ = kNoId;
  TensorId most_recent_ = kNoId;
  // By place.
  std::vector<TensorState> entries_;
  std::vector<Details> details_;
  std::vector<uint64_t> ready_;  // a bit per rank, words_per_entry_ words per place
};

}  // namespace hvl
