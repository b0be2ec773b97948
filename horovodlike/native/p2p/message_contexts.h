// The process sets as namespaces of tags. The ids of process sets are used again, so each registration of one gets a
// number of its own, its context, which is the same on all ranks. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "p2p/message_request.h"

namespace hvl {

class MessageContexts {
 public:
  void add(int32_t id, std::vector<int> ranks) { process_sets_[id] = ProcessSet{next_++, std::move(ranks)}; }
  // Returns its context.
  uint64_t remove(int32_t id);
  // Sets the context of a request of `rank`, and checks that the process set has both ranks.
  Status find(int rank, MessageRequest* request) const;
  // True if this rank has removed it. A context that it does not know may be of a set that it has yet to add.
  bool is_removed(uint64_t context) const;

 private:
  struct ProcessSet {
    uint64_t context;
    std::vector<int> ranks;  // ascending
  };

  std::map<int32_t, ProcessSet> process_sets_;  // by id
  uint64_t next_ = 0;
};

}  // namespace hvl
