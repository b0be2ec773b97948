// Receives that wait for their messages, and messages that wait for their receives. Pure.
//
// A receive gets the message that arrived first among those of its source, tag and context, and a message the receive
// that was posted first. A receive from any source matches the messages of all.
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
  bool has_payload = false;   // else the sender keeps it until it is asked for
  uint64_t id = 0;            // the number that the sender has given the message, if it keeps the payload
  std::vector<char> payload;  // if it is here
  MessageRequestPtr send;     // a message of this rank to itself, whose payload is still in the memory of the send
};

class MatchTable {
 public:
  // The receive that was posted first of those that fit, which leaves the table; null: there is none.
  MessageRequestPtr take_receive(const MessageHeader& message);
  // take_receive() has found none.
  void keep(Arrival arrival);
  // The message that arrived first of those that fit leaves the table, in *arrival; false: there is none.
  bool take_arrival(const MessageHeader& receive, Arrival* arrival);
  // take_arrival() has found none.
  void keep(MessageRequestPtr receive);

  // Whether a receive waits for a message of this rank, or of any.
  bool awaits(int source) const;
  size_t num_receives() const { return num_receives_; }
  // The receive that was posted first of all; null: there is none.
  const MessageRequest* oldest_receive() const;
  // All of a context leave the table.
  void take_context(uint64_t context, std::vector<MessageRequestPtr>* receives, std::vector<Arrival>* arrivals);
  // All receives, and the sends of this rank to itself, leave the table. Of the arrivals stay those that are here, if
  // they are kept.
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
  // In the order in which they came. No receive fits an arrival beside it.
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
