// The messages between this rank and one other: sends the outgoing ones, and handles the incoming frames.
//
// Only the thread that holds the engine lock may use it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "p2p/message_receiver.h"

namespace hvl {

class PeerLink {
 public:
  // `peer`: the other rank's name, for errors. `keys`: as in FrameCoder.
  PeerLink(int rank, const std::string& peer, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
           MessageEvents* events);

  int rank() const { return rank_; }
  PeerStream& stream() const { return *stream_; }

  void send(MessageRequestPtr request) { sender_.send(std::move(request)); }
  // Begins to fetch an announced message for its receive, which has the same size and dtype.
  void request(const Announcement& announcement, const MessageHeader& message, MessageRequestPtr receive) {
    receiver_.request(announcement, message, std::move(receive));
  }
  // Answers the announcement of a message that is not needed, with kDone or kRemoved.
  void decline(uint64_t id, MessageFrame::Kind why) { sender_.send_frame(why, id); }
  // Returns the credit of an eager message of `num_bytes` bytes that a receive has taken, or that has been dropped.
  void give_credit(uint64_t num_bytes);

  // Moves bytes, and handles the frames that have arrived. An error breaks the job, unless is_lost(): then the
  // connection is lost, perhaps because the peer has left the job, and nothing moves any more.
  Status progress(bool* progressed);
  // As in PeerStream.
  bool can_progress() const {
    const bool can_copy = receiver_.can_copy() || sender_.can_copy();
    return (has_more_ || can_copy || sender_.can_progress() || stream_->can_progress()) && !is_lost_;
  }
  // True if there is something to send, now or later.
  bool is_sending() const { return !is_lost_ && !sender_.is_idle(); }
  bool is_lost() const { return is_lost_; }
  // Called when this rank leaves the job: finishes the copies under way, then sends kEnd and nothing else.
  void finish();
  // Called when the job is broken, as the last call before take_all(), until which `why` is borrowed: sends the reason,
  // if the stream takes it at once.
  void tell_broken(const std::string& why);
  // True if this rank's last frame has been sent, and the peer's has come.
  bool is_finished() const { return is_lost_ || (has_ended_ && sender_.is_idle()); }
  // True if requests of this rank on this link have not ended.
  bool has_requests() const { return receiver_.has_requests() || sender_.has_requests(); }
  // Removes all requests, and appends them to *requests. The link must not progress any more.
  void take_all(std::vector<MessageRequestPtr>* requests);

 private:
  void await_header();
  void await_payload(char* memory);
  Status take();
  Status begin_frame();
  void end_payload();
  Status answered(bool is_known) const;
  Status wrong(const std::string& what) const;

  const int rank_;
  const std::unique_ptr<PeerStream> stream_;
  FrameCoder coder_;
  MessageEvents& events_;
  MessageSender sender_;
  MessageReceiver receiver_;
  bool is_lost_ = false;
  bool has_ended_ = false;  // the peer has sent its last frame
  bool has_more_ = false;  // the last progress() ended at its bound: the stream may have bytes that no descriptor shows

  MessageFrame frame_;           // under way
  bool awaits_payload_ = false;  // this frame's payload; false: the next frame's header
  uint64_t end_ = 0;             // the end of the awaited bytes in the stream
  char header_[FrameCoder::kBytes];
  std::vector<char> payload_;  // the payload of an eager message, or of kBroken
  uint64_t credit_to_give_ = 0;
};

}  // namespace hvl
