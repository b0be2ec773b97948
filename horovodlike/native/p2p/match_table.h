// Receives that wait for their messages, and messages that wait for their receives. Pure.
//
// A receive takes the first message to arrive with its source, tag and context; a message goes to the first receive
// posted that it matches. A receive from any source matches messages from all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <unordered_map>
#include <vector>

#include "p2p/message_request.h"

namespace hvl {

// A message that no receive has asked for so far.
struct Arrival {
  MessageHeader header;
  bool has_payload = false;   // false: the sender keeps it until it is asked for
  Announcement announcement;  // if the sender keeps it
  std::vector<char> payload;  // if `has_payload`
  MessageRequestPtr send;     // a message of this rank to itself, whose payload is still in the memory of the send
};

class MatchTable {
 public:
  // Removes the matching receive that was posted first, and returns it; null: there is none.
  MessageRequestPtr take_receive(const MessageHeader& message);
  // Adds a message for which take_receive() has found no receive.
  void keep(Arrival arrival);
  // Removes the matching message that arrived first, and returns it in *arrival; false: there is none.
  bool take_arrival(const MessageHeader& receive, Arrival* arrival);
  // Adds a receive for which take_arrival() has found no message.
  void keep(MessageRequestPtr receive);

  // True if a receive waits for a message from `source`, or from any source.
  bool awaits(int source) const;
  size_t num_receives() const { return num_receives_; }
  // The receive in the table that was posted first; null: there is none.
  const MessageRequest* oldest_receive() const;
  // Removes all receives and messages of a context, and appends them to *receives and *arrivals.
  void take_context(uint64_t context, std::vector<MessageRequestPtr>* receives, std::vector<Arrival>* arrivals);
  // Removes all receives, and the sends of this rank to itself, and appends them to *requests. Removes the messages,
  // too; with `keeps_arrivals` only those without a payload.
  void take_requests(std::vector<MessageRequestPtr>* requests, bool keeps_arrivals);

 private:
  struct Key {
    uint64_t context;
    int64_t tag;
    bool operator==(const Key& other) const { return context == other.context && tag == other.tag; }
  };
  struct KeyHash {
    size_t operator()(const Key& key) const {
      return static_cast<size_t>((static_cast<uint64_t>(key.tag) ^ key.context << 40) * 0x9e3779b97f4a7c15u >> 7);
    }
  };
  // Both are in the order in which they came. None of the receives matches one of the arrivals.
  struct Waiting {
    std::list<MessageRequestPtr> receives;
    std::list<Arrival> arrivals;
  };
  using Table = std::unordered_map<Key, Waiting, KeyHash>;

  void forget_if_empty(Table::iterator waiting);

  Table table_;
  size_t num_receives_ = 0;
};

}  // namespace hvl
