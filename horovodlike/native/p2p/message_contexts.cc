#include "p2p/message_contexts.h"

#include <algorithm>
#include <string>

namespace hvl {

uint64_t MessageContexts::remove(int32_t id) {
  const auto found = process_sets_.find(id);
  const uint64_t context = found->second.context;
  process_sets_.erase(found);
  return context;
}

Status MessageContexts::find(int rank, MessageRequest* request) const {
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

bool MessageContexts::is_removed(uint64_t context) const {
  return context < next_ && std::none_of(
                                process_sets_.begin(), process_sets_.end(),
                                [&](const auto& each) { return each.second.context == context; });
}

}  // namespace hvl
