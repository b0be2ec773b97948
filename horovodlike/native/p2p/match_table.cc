#include "p2p/match_table.h"

#include <algorithm>
#include <utility>

namespace hvl {

namespace {

bool fits(const MessageHeader& receive, int source) { return receive.source == kAnySource || receive.source == source; }

}  // namespace

void MatchTable::forget_if_empty(Table::iterator waiting) {
  if (waiting->second.receives.empty() && waiting->second.arrivals.empty()) table_.erase(waiting);
}

MessageRequestPtr MatchTable::take_receive(const MessageHeader& message) {
  const auto waiting = table_.find(Key{message.context, message.tag});
  if (waiting == table_.end()) return nullptr;
  auto& receives = waiting->second.receives;
  const auto found = std::find_if(receives.begin(), receives.end(),
                                  [&](const auto& receive) { return fits(receive->header, message.source); });
  if (found == receives.end()) return nullptr;
  MessageRequestPtr receive = std::move(*found);
  receives.erase(found);
  --num_receives_;
  forget_if_empty(waiting);
  return receive;
}

void MatchTable::keep(Arrival arrival) {
  const Key key{arrival.header.context, arrival.header.tag};
  table_[key].arrivals.push_back(std::move(arrival));
}

bool MatchTable::take_arrival(const MessageHeader& receive, Arrival* arrival) {
  const auto waiting = table_.find(Key{receive.context, receive.tag});
  if (waiting == table_.end()) return false;
  auto& arrivals = waiting->second.arrivals;
  const auto found = std::find_if(arrivals.begin(), arrivals.end(),
                                  [&](const Arrival& each) { return fits(receive, each.header.source); });
  if (found == arrivals.end()) return false;
  *arrival = std::move(*found);
  arrivals.erase(found);
  forget_if_empty(waiting);
  return true;
}

void MatchTable::keep(MessageRequestPtr receive) {
  const Key key{receive->header.context, receive->header.tag};
  table_[key].receives.push_back(std::move(receive));
  ++num_receives_;
}

bool MatchTable::awaits(int source) const {
  return std::any_of(table_.begin(), table_.end(), [&](const auto& waiting) {
    const auto& receives = waiting.second.receives;
    return std::any_of(receives.begin(), receives.end(),
                       [&](const auto& receive) { return fits(receive->header, source); });
  });
}

const MessageRequest* MatchTable::oldest_receive() const {
  const MessageRequest* oldest = nullptr;
  for (const auto& [key, waiting] : table_) {
    if (waiting.receives.empty()) continue;
    const MessageRequest* first = waiting.receives.front().get();
    if (oldest == nullptr || first->posted_at < oldest->posted_at) oldest = first;
  }
  return oldest;
}

void MatchTable::take_context(uint64_t context, std::vector<MessageRequestPtr>* receives,
                              std::vector<Arrival>* arrivals) {
  for (auto waiting = table_.begin(); waiting != table_.end();) {
    if (waiting->first.context != context) {
      ++waiting;
      continue;
    }
    num_receives_ -= waiting->second.receives.size();
    for (MessageRequestPtr& receive : waiting->second.receives) receives->push_back(std::move(receive));
    for (Arrival& arrival : waiting->second.arrivals) arrivals->push_back(std::move(arrival));
    waiting = table_.erase(waiting);
  }
}

void MatchTable::take_requests(std::vector<MessageRequestPtr>* requests, bool keeps_arrivals) {
  for (auto& [key, waiting] : table_) {
    for (MessageRequestPtr& receive : waiting.receives) requests->push_back(std::move(receive));
    waiting.receives.clear();
    for (Arrival& arrival : waiting.arrivals) {
      if (arrival.send != nullptr) requests->push_back(std::move(arrival.send));
    }
    waiting.arrivals.remove_if([&](const Arrival& arrival) { return !keeps_arrivals || !arrival.has_payload; });
  }
  num_receives_ = 0;
}

}  // namespace hvl
