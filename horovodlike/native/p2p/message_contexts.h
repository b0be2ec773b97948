// The process sets as namespaces of tags. Ids of process sets are reused, so each process set that is added has a
// unique number, its context. It is the same on all ranks. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "p2p/message_request.h"

namespace hvl {

class MessageContexts {
 public:
  void add(int32_t id, std::vector<int> ranks) { process_sets_[id] = ProcessSet{next_++, std::move(ranks)}; }

  // Removes a process set, and returns its context.
  uint64_t remove(int32_t id) {
    const auto found = process_sets_.find(id);
    const uint64_t context = found->second.context;
    process_sets_.erase(found);
    return context;
  }

  // Sets the context of a request of `rank`, and checks that the process set has both ranks.
  Status find(int rank, MessageRequest* request) const {
    const std::string id = std::to_string(request->process_set);
    const auto found = process_sets_.find(request->process_set);
    if (found == process_sets_.end()) {
      return Status(HVL_INVALID_ARGUMENT, "a message is for process set " + id + ", which does not exist (any more)");
    }
    for (int each : {rank, request->peer}) {
      const auto& ranks = found->second.ranks;
      if (each == kAnySource || std::binary_search(ranks.begin(), ranks.end(), each)) continue;
      return Status(HVL_INVALID_ARGUMENT, "rank " + std::to_string(each) + " is not a member of process set " + id +
                                              ", for which rank " + std::to_string(rank) + " has a message");
    }
    request->header.context = found->second.context;
    return Status();
  }

  // True if this rank has removed the context. An unknown context is of a process set that this rank has yet to add.
  bool is_removed(uint64_t context) const {
    const auto has_it = [&](const auto& each) { return each.second.context == context; };
    return context < next_ && std::none_of(process_sets_.begin(), process_sets_.end(), has_it);
  }

 private:
  struct ProcessSet {
    uint64_t context;
    std::vector<int> ranks;  // ascending
  };

  std::map<int32_t, ProcessSet> process_sets_;  // by id
  uint64_t next_ = 0;
};

}  // namespace hvl
