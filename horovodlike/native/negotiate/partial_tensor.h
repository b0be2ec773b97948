// The messages about one tensor that an aggregator holds, and their merging into as few messages as possible.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "negotiate/message.h"
#include "negotiate/tensor_table.h"

namespace hvl {

// The times at which ranks were ready, by this host's clock.
struct Times {
  uint64_t since = UINT64_MAX;  // when the first rank was ready
  uint64_t last = 0;            // when the last rank, `latest`, was ready
  int latest = -1;

  void add(const Times& other) {
    since = std::min(since, other.since);
    if (latest >= 0 && last >= other.last) return;
    last = other.last;
    latest = other.latest;
  }
};

// A message whose times become ages only when it is sent.
struct Outgoing {
  Message message;
  Times times;
};

class PartialTensor {
 public:
  // As the log defines the tensor; until then, as the first rank requested it.
  std::string name;
  int32_t process_set = 0;
  Kind kind = HVL_ALLREDUCE;
  TensorId id = kNoId;
  std::vector<int64_t> arguments;  // the arguments of a change of process sets

  uint64_t deadline = 0;  // when the held messages are released in any case; 0: nothing is held
  RankSet joined;         // the ranks that wait in a join

  bool is_empty() const { return num_held_ == 0; }
  // True if `num_ranks` ranks have announced the tensor and wait for the log's answer.
  bool is_announced_by(int32_t num_ranks) const {
    return num_held_ + gone_by_id_.size() + gone_in_full_.size() == num_ranks;
  }
  RankSet announcers() const;  // the ranks that is_announced_by() counts
  bool is_unused() const { return id == kNoId && is_empty() && joined.empty() && gone_in_full_.empty(); }
  bool holds_any_of(const RankSet& ranks) const;

  void add_ready(const RankSet& ranks, const Times& times);
  void add_request(const Message& request, const Times& times);
  // Appends the held messages; afterwards none is held.
  void release(std::vector<Outgoing>* out);

  // Ends the tensor's use that the log has answered. Announcements of the `absent` ranks count for its next use.
  void answer(const RankSet& absent);
  // Forgets the id, which is no longer defined, and the announcements by it.
  void forget_id();
  // Drops the held messages: the log has answered them before they were sent.
  void drop();

 private:
  void count(const RankSet& ranks);

  struct Ready {
    RankSet ranks;
    Times times;
  };
  // Ranks whose requests differ only in the varying values.
  struct Request {
    Signature signature;  // without the varying values
    size_t num_varying;   // varying values per rank
    RankSet ranks;
    Times times;
    std::vector<Message> parts;  // `ranks` and `varying` only; empty if nothing may vary
  };

  static Message message_of(Request* request);

  // The held messages.
  Ready ready_;  // by the id
  std::vector<Request> requests_;
  int32_t num_held_ = 0;  // ranks
  // The ranks whose messages were sent to the parent host and are not answered yet. No rank is in both sets.
  RankSet gone_by_id_;
  RankSet gone_in_full_;
};

// Appends a message that `ranks` have the tensor ready; adds the id to the last one if ranks and times are equal.
void append_ready(TensorId id, const RankSet& ranks, const Times& times, std::vector<Outgoing>* out);

}  // namespace hvl
