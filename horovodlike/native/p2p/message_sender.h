// The outgoing side of a link: messages of this rank to one other, as frames that take turns, so that a large message
// does not hold up a small one.
//
// A small message is sent at once (eager), as long as the receiver does not have too many that it has not asked for:
// the credit. Any other is announced, and sent from the memory of its request when a receive has asked for it. So what
// a rank keeps for messages without a receive is bounded by the credit, and by the headers of sends that wait.
//
// For the thread that holds the engine lock.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

#include "p2p/message_frame.h"
#include "p2p/peer_stream.h"

namespace hvl {

// The events of a link, for the messenger.
class MessageEvents {
 public:
  virtual ~MessageEvents() = default;
  // An eager message has arrived; the payload is valid during the call. Returns true if a receive has got it.
  virtual bool on_message(const MessageHeader& message, const char* payload) = 0;
  virtual void on_announcement(const MessageHeader& message, const Announcement& announcement) = 0;
  // A request has ended. `message`: the one that a receive has got.
  virtual void on_end(const MessageRequest& request, Status status, const MessageHeader& message) = 0;
};

// Of eager messages that the receiver has not asked for.
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
  // Sends kEnd behind all that is under way, and nothing behind it: requests that come later wait for take_all().
  void finish();
  // Sends a frame without payload.
  void send_frame(MessageFrame::Kind kind, uint64_t id, uint64_t num_bytes = 0);
  // The receiver asks for the message of an id; false: there is none.
  bool begin_message(uint64_t id);
  // The receiver does not need it, for the reason of `status`; false: there is none.
  bool drop_message(uint64_t id, Status status);
  void add_credit(uint64_t num_bytes) { credit_ += num_bytes; }

  // Hands frames to the stream and ends those that it has sent; sets *progressed if it did.
  void progress(bool* progressed);
  // True if progress() would do something.
  bool can_progress() const { return is_sending_ ? stream_.has_sent(end_) : has_frames(); }

  // Copies a piece of a message that the receiver copies, too.
  void copy(bool* progressed);
  bool can_copy() const { return stream_.sent_copy() != nullptr && stream_.sent_copy()->has_pieces(); }

  bool is_idle() const { return !is_sending_ && !has_frames(); }
  // True if requests wait here.
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
  std::deque<Fragments> messages_;                             // they take turns
  std::unordered_map<uint64_t, MessageRequestPtr> announced_;  // by id
  Outgoing sending_;
  bool is_sending_ = false;
  uint64_t end_ = 0;  // of that frame in the stream
  char header_[FrameCoder::kBytes];
  uint64_t credit_ = kMessageCredit;
  uint64_t next_id_ = 1;
  int num_in_a_row_ = 0;  // frames, since the last fragment
  End last_frame_ = End::kNone;
};

}  // namespace hvl
