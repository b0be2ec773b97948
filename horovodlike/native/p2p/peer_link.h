// The messages between this rank and one other: the outgoing ones, and what the incoming frames say.
//
// For the thread that holds the engine lock.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "p2p/message_sender.h"

namespace hvl {

class PeerLink {
 public:
  // `peer`: its name for messages. `keys`: as in FrameCoder.
  PeerLink(int rank, const std::string& peer, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
           MessageEvents* events);

  int rank() const { return rank_; }
  PeerStream& stream() const { return *stream_; }

  void send(MessageRequestPtr request) { sender_.send(std::move(request)); }
  // Asks for the message of an id, which has been announced and fits the receive.
  void request(uint64_t id, const MessageHeader& message, MessageRequestPtr receive);
  // Answers the announcement of a message that is not needed, with kDone or kRemoved.
  void decline(uint64_t id, MessageFrame::Kind why) { sender_.send_frame(why, id); }
  // A receive has got an eager message of so many bytes, or it has been dropped.
  void give_credit(uint64_t num_bytes);

  // Moves what can be moved. An error breaks the job, unless is_lost(): then the connection is lost, perhaps because
  // the peer has left the job, and nothing moves any more.
  Status progress(bool* progressed);
  // As in PeerStream.
  bool can_progress() const { return can_send() || (!is_lost_ && stream_->can_progress()); }
  // True if the next frame can be sent.
  bool can_send() const { return !is_lost_ && sender_.can_progress(); }
  // True if there is something to send, now or later.
  bool is_sending() const { return !is_lost_ && !sender_.is_idle(); }
  bool is_lost() const { return is_lost_; }
  // This rank leaves the job: nothing is sent behind the frame that says so.
  void finish() { sender_.send_frame(MessageFrame::Kind::kEnd, 0); }
  // True if this rank's last frame has been sent, and the peer's has come.
  bool is_finished() const { return is_lost_ || (has_ended_ && sender_.is_idle()); }
  // True if requests of this rank have not ended here.
  bool has_requests() const { return !incoming_.empty() || sender_.has_requests(); }
  // All requests leave the link, which must not progress any more.
  void take_all(std::vector<MessageRequestPtr>* requests);

 private:
  // A message that is received in fragments.
  struct Incoming {
    MessageRequestPtr receive;
    MessageHeader message;
    uint64_t num_received = 0;
  };

  void await_header();
  Status take();
  Status begin_frame();
  Status begin_data();
  void end_payload();
  Status answered(bool is_known) const;
  Status wrong(const std::string& what) const;

  const int rank_;
  const std::string peer_;
  const std::unique_ptr<PeerStream> stream_;
  FrameCoder coder_;
  MessageEvents& events_;
  MessageSender sender_;
  bool is_lost_ = false;
  bool has_ended_ = false;  // the peer has sent its last frame

  std::unordered_map<uint64_t, Incoming> incoming_;  // by the sender's id
  MessageFrame frame_;                               // under way
  bool awaits_payload_ = false;                      // of this frame; else the header of the next one
  uint64_t end_ = 0;                                 // of what is awaited, in the stream
  char header_[FrameCoder::kBytes];
  std::unique_ptr<char[]> eager_;  // its payload, of an eager message
  uint64_t credit_to_give_ = 0;
};

}  // namespace hvl
