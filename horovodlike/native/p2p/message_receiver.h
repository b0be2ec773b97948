// The incoming side of a link: announced messages that this rank has asked for, until they are in the memory of their
// receives.
//
// From a rank of this host a message is copied directly out of the sender's memory, if the system allows it: one copy,
// which both ranks may share (JointCopy). Otherwise the sender sends fragments.
//
// Only the thread that holds the engine lock may use it.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "p2p/message_sender.h"

namespace hvl {

class MessageReceiver {
 public:
  MessageReceiver(PeerStream* stream, MessageSender* answers, MessageEvents* events)
      : stream_(*stream), answers_(*answers), events_(*events) {}
  MessageReceiver(const MessageReceiver&) = delete;
  MessageReceiver& operator=(const MessageReceiver&) = delete;

  // Begins to fetch an announced message for its receive, which has the same size and dtype.
  void request(const Announcement& announcement, const MessageHeader& message, MessageRequestPtr receive);
  // Returns the memory for a fragment; null: its message was not asked for, or another fragment must come next.
  char* memory_for(const MessageFrame& fragment) const;
  // Counts a fragment that is in its memory as received, and ends the receive with its message's last one.
  void end_fragment(const MessageFrame& fragment);

  // Copies the next piece of the joint copy, and the next piece of one other message; those take turns.
  void copy(bool* progressed);
  // True if copy() would do something.
  bool can_copy() const;
  // True if a joint copy has ended since the last call: a good time to use the message, as the sender copies the next.
  bool take_ended() { return std::exchange(has_ended_, false); }
  // True if messages are being copied, here or by the sender.
  bool is_copying() const { return !copied_.empty() || jointly_.receive != nullptr; }

  bool has_requests() const { return is_copying() || !fragmented_.empty(); }
  void take_all(std::vector<MessageRequestPtr>* requests);

 private:
  struct Incoming {
    MessageRequestPtr receive;
    MessageHeader message;
    Announcement announcement;
    uint64_t num_received = 0;

    bool is_complete() const { return num_received == message.num_bytes; }
  };

  bool can_be_joint(const Incoming& incoming) const;
  // True if the next joint copy is better than one by this rank alone, as the one under way is short.
  bool waits_for_turn(const Incoming& incoming) const;
  void begin_jointly();
  void copy_jointly(bool* progressed);
  void copy_alone(bool* progressed);
  void end_copy(const Incoming& incoming);
  void request_fragments(Incoming incoming);

  PeerStream& stream_;
  MessageSender& answers_;
  MessageEvents& events_;
  bool may_copy_ = true;                               // until the system refuses it
  bool may_sender_copy_ = true;                        // likewise
  bool has_ended_ = false;                             // a joint copy
  Incoming jointly_;                                   // the joint copy; its receive is null if there is none
  std::deque<Incoming> copied_;                        // copied by this rank alone; they take turns
  std::unordered_map<uint64_t, Incoming> fragmented_;  // by the sender's id
};

}  // namespace hvl
