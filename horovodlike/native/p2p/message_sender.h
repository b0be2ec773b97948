// The outgoing side of a link: messages of this rank to one other, as frames that take turns, so that a large message
// does not hold up a small one.
//
// A small message is sent at once (eager) if the messages that the receiver must keep for later receives stay within
// the credit. Any other message is announced, and sent from the memory of its request when a receive has asked for it.
// So the memory of a rank for messages without a receive is bounded by the credit, and by the headers of announced
// messages.
//
// Only the thread that holds the engine lock may use it.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "p2p/message_frame.h"
#include "p2p/peer_stream.h"

namespace hvl {

// The events of a link, for the messenger.
class MessageEvents {
 public:
  virtual ~MessageEvents() = default;
  // An eager message has arrived; the payload is valid during the call. Returns false if it is kept for a receive.
  virtual bool on_message(const MessageHeader& message, const char* payload) = 0;
  virtual void on_announcement(const MessageHeader& message, const Announcement& announcement) = 0;
  // A request has ended. `message`: the header of the message that was sent or received.
  virtual void on_end(const MessageRequest& request, Status status, const MessageHeader& message) = 0;
};

// The bytes of eager messages, with headers, that may wait at the receiver for their receives.
constexpr uint64_t kMessageCredit = uint64_t{1} << 20;

// The part of the credit that an eager message takes.
constexpr uint64_t credit_of(uint64_t num_bytes) { return FrameCoder::kBytes + num_bytes; }

class MessageSender {
 public:
  MessageSender(PeerStream* stream, FrameCoder* coder, MessageEvents* events)
      : stream_(*stream), coder_(*coder), events_(*events) {}
  MessageSender(const MessageSender&) = delete;
  MessageSender& operator=(const MessageSender&) = delete;

  void send(MessageRequestPtr request);
  // Sends kEnd after all frames under way, and nothing after it: later requests stay here until take_all().
  void finish();
  // Sends a frame without payload.
  void send_frame(MessageFrame::Kind kind, uint64_t id, uint64_t num_bytes = 0);
  // Sends kBroken as the next frame. `why` is borrowed until it is sent, or until take_all().
  void send_broken(const std::string& why);
  // Begins to send the data of a message, for which the receiver has asked. False: there is none of this id.
  bool begin_message(uint64_t id);
  // Ends the request of a message with `status`, as the receiver needs no data. False: there is none of this id.
  bool drop_message(uint64_t id, Status status);
  void add_credit(uint64_t num_bytes) { credit_ += num_bytes; }

  // Hands the next frame to the stream, and ends requests that it has sent; sets *progressed if it did anything.
  void progress(bool* progressed);
  // True if progress() would do something.
  bool can_progress() const { return is_sending_ ? stream_.has_sent(end_) : has_frames(); }

  // Copies a piece of the joint copy that the receiver has begun, if there is one.
  void copy(bool* progressed);
  bool can_copy() const { return stream_.sent_copy() != nullptr && stream_.sent_copy()->has_pieces(); }

  bool is_idle() const { return !is_sending_ && !has_frames(); }
  // True if requests of this side have not ended.
  bool has_requests() const;
  void take_all(std::vector<MessageRequestPtr>* requests);

 private:
  struct Outgoing {
    MessageFrame frame;
    const char* payload = nullptr;
    MessageRequestPtr last_of;  // the request that ends with this frame
  };
  // A message that is sent in fragments.
  struct Fragments {
    MessageRequestPtr request;
    uint64_t id = 0;
    uint64_t offset = 0;
  };

  enum class End { kNone, kDue, kSent };

  bool has_frames() const { return !frames_.empty() || !messages_.empty() || last_frame_ == End::kDue; }
  Outgoing next_frame();
  Outgoing next_fragment();

  PeerStream& stream_;
  FrameCoder& coder_;
  MessageEvents& events_;
  std::deque<Outgoing> frames_;                                // in the order of the sends
  std::deque<Fragments> messages_;                             // sent in fragments; they take turns
  std::unordered_map<uint64_t, MessageRequestPtr> announced_;  // by id
  Outgoing sending_;
  bool is_sending_ = false;
  uint64_t end_ = 0;  // the end of `sending_` in the stream
  char header_[FrameCoder::kBytes];
  uint64_t credit_ = kMessageCredit;
  uint64_t next_id_ = 1;
  int num_in_a_row_ = 0;  // other frames since the last fragment
  End last_frame_ = End::kNone;
};

}  // namespace hvl
