// What a aggregator holds of one tensor, and how it says that in as few messages as can be.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "negotiate/message.h"
#include "negotiate/tensor_table.h"

namespace hvl {

// When ranks were ready, by this host's clock.
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

// A message with times that are ages only when it leaves.
struct Outgoing {
  Message message;
  Times times;
};

class PartialTensor {
 public:
  // As the log defines it; until then, as the first rank asked for it.
  std::string name;
  int32_t process_set = 0;
  Kind kind = HVL_ALLREDUCE;
  TensorId id = kNoId;
  std::vector<int64_t> arguments;  // of a change of process sets

  uint64_t deadline = 0;  // when what is held goes on in any case; 0: nothing is held
  RankSet joined;         // of a join: who waits in it

  bool is_empty() const { return num_held_ == 0; }
  // Whether so many ranks have announced it and wait for what the log says.
  bool is_announced_by(int32_t num_ranks) const {
    return num_held_ + gone_by_id_.size() + gone_in_full_.size() == num_ranks;
  }
  RankSet announcers() const;  // those ranks
  bool is_unused() const { return id == kNoId && is_empty() && joined.empty() && gone_in_full_.empty(); }
  bool holds_any_of(const RankSet& ranks) const;

  void add_ready(const RankSet& ranks, const Times& times);
  void add_request(const Message& request, const Times& times);
  // Appends what is held, and holds nothing then.
  void release(std::vector<Outgoing>* out);

  // What the log says of it. Of those that are `absent`, whatever they have said is for the next time.
  void answer(const RankSet& absent);
  // The id stands for nothing any more, and so does what was announced by it.
  void forget_id();
  // What is held is answered before it has gone on.
  void drop();

 private:
  void count(const RankSet& ranks);

  struct Ready {
    RankSet ranks;
    Times times;
  };
  // Ranks that ask for the same but for what varies.
  struct Request {
    Signature signature;  // without what varies
    size_t num_varying;   // of a rank
    RankSet ranks;
    Times times;
    std::vector<Message> parts;  // `ranks` and `varying` only; nothing where nothing may vary
  };

  static Message message_of(Request* request);

  // Held.
  Ready ready_;  // by the id
  std::vector<Request> requests_;
  int32_t num_held_ = 0;  // ranks
  // Gone on, and not answered: no rank is in two of all these.
  RankSet gone_by_id_;
  RankSet gone_in_full_;
};

// Says that `ranks` have the tensor ready, together with the last message where that says the same of another one.
void append_ready(TensorId id, const RankSet& ranks, const Times& times, std::vector<Outgoing>* out);

}  // namespace hvl
