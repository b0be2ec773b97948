// The data plane: moves and reduces the bytes of batches that all ranks of a team run in the same order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "collective/batch.h"

namespace hvl {

// The ranks that take part in a collective.
struct Team {
  std::vector<int> ranks;  // ascending
  size_t mine = 0;         // this rank's place among them; the number of ranks if it is no member
  bool is_whole = true;    // all members of the process set take part

  Team() = default;
  Team(std::vector<int> members, int rank) : ranks(std::move(members)) {
    mine = static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }
  size_t size() const { return ranks.size(); }
  bool is_member() const { return mine < ranks.size(); }
  bool contains(int rank) const { return std::binary_search(ranks.begin(), ranks.end(), rank); }
  // The index in `ranks` of a member.
  int place_of(int rank) const {
    return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }
};

using TeamPtr = std::shared_ptr<const Team>;

// Called repeatedly with the number of bytes of the stream that are final in the outputs, so that a tensor completes
// before its batch does.
using FinalBytes = std::function<void(uint64_t num_bytes)>;

// The bytes sent to, or received from, one member of a team.
template <typename Byte>
struct Block {
  Byte* data;
  uint64_t num_bytes;
};

// One member's view of one allgather.
struct Gather {
  const char* input;                // its own block
  std::vector<Block<char>> blocks;  // the output, by place in the team; contiguous
};

// One member's view of one reducescatter.
struct Scatter {
  std::vector<Block<const char>> blocks;  // the input, by place in the team; each has whole elements
  char* output;                           // its own block, reduced
  Reduction reduction;
};

// One member's view of one alltoall.
struct Exchange {
  std::vector<Block<const char>> sent;  // by place in the team
  std::vector<Block<char>> received;
  uint64_t longest;  // bytes of the longest block that any two members exchange
};

// All functions are called by the engine, one at a time, and return when this rank's part is done. HVL_IN_PROGRESS: the
// thread was interrupted while it waited for other ranks; the next call, with the same arguments, continues from there.
// Any other error means that the job is broken; the outputs are then undefined.
class DataPlane {
 public:
  virtual ~DataPlane() = default;

  // The next call is the `number`-th collective of the log. `team` runs it; this rank is a member.
  virtual void begin(TeamPtr team, uint64_t number) = 0;

  virtual Status allreduce(const Batch& batch, const FinalBytes& final_bytes) = 0;
  // `root`: the root's place in the team. Only the root's outputs are written; other members' outputs may be null.
  virtual Status reduce_to(const Batch& batch, int root, const FinalBytes& final_bytes) = 0;
  virtual Status broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) = 0;
  virtual Status allgather(const Gather& gather) = 0;
  virtual Status reducescatter(const Scatter& scatter) = 0;
  virtual Status alltoall(const Exchange& exchange) = 0;

  // The transport of the collective under way, if it has several ranks.
  virtual hvl_transport transport() const = 0;
  // True if something other than this process's threads may still write to the outputs of a failed collective.
  virtual bool holds_memory() const { return false; }

  // In a forked child: closes its copies of the connections, as ControlPlane::close_in_child() does.
  virtual void close_in_child() {}
};

}  // namespace hvl
