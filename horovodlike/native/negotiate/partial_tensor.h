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
  uint64_t since = UINT64_MAX;  // the first of them
  uint64_t last = 0;            // the last of them, `latest`
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
  // As the log defines it; until then, as the first rank requested it.
  std::string name;
  int32_t process_set = 0;
  Kind kind = HVL_ALLREDUCE;
  TensorId id = kNoId;
  std::vector<int64_t> arguments;  // of a change of process sets

  uint64_t deadline = 0;  // when the held messages are released in any case; 0: nothing is held
  RankSet joined;         // of a join: the ranks that wait in it

  bool is_empty() const { return num_held_ == 0; }
  // True if `num_ranks` ranks have announced it and wait for the log.
  bool is_announced_by(int32_t num_ranks) const {
    return num_held_ + gone_by_id_.size() + gone_in_full_.size() == num_ranks;
  }
  RankSet announcers() const;  // those ranks
  bool is_unused() const { return id == kNoId && is_empty() && joined.empty() && gone_in_full_.empty(); }
  bool holds_any_of(const RankSet& ranks) const;

  void add_ready(const RankSet& ranks, const Times& times);
  void add_request(const Message& request, const Times& times);
  // Appends the held messages, and holds nothing afterwards.
  void release(std::vector<Outgoing>* out);

  // The log has answered it. Announcements of the `absent` ranks count for the next time.
  void answer(const RankSet& absent);
  // The id is no longer defined: forgets it and the announcements by it.
  void forget_id();
  // Drops everything held: the log has answered it before it was sent.
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
    size_t num_varying;   // of a rank
    RankSet ranks;
    Times times;
    std::vector<Message> parts;  // `ranks` and `varying` only; empty if nothing may vary
  };

  static Message message_of(Request* request);

  // Held.
  Ready ready_;  // by the id
  std::vector<Request> requests_;
  int32_t num_held_ = 0;  // ranks
  // Sent on, and not answered: no rank is in two of these sets.
  RankSet gone_by_id_;
  RankSet gone_in_full_;
};

// Appends that `ranks` have the tensor ready; extends the last message if that says the same of another tensor.
void append_ready(TensorId id, const RankSet& ranks, const Times& times, std::vector<Outgoing>* out);

}  // namespace hvl
