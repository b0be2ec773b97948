#include "p2p/message_sender.h"

#include <algorithm>
#include <utility>

namespace hvl {

namespace {

constexpr int kMostInARow = 16;  // frames before a fragment has its turn

}  // namespace

void MessageSender::send(MessageRequestPtr request) {
  if (last_frame_ == End::kSent) {
    announced_[next_id_++] = std::move(request);
    return;
  }
  Outgoing outgoing;
  MessageFrame& frame = outgoing.frame;
  const MessageHeader& header = request->header;
  frame.dtype = header.dtype;
  frame.context = header.context;
  frame.tag = header.tag;
  frame.num_bytes = header.num_bytes;
  if (header.num_bytes <= kEagerBytes && credit_of(header.num_bytes) <= credit_) {
    credit_ -= credit_of(header.num_bytes);
    outgoing.payload = request->data;
    outgoing.last_of = std::move(request);
  } else {
    frame.kind = MessageFrame::Kind::kAnnounce;
    frame.id = next_id_++;
    if (stream_.can_copy()) frame.offset = reinterpret_cast<uintptr_t>(request->data);
    announced_[frame.id] = std::move(request);
  }
  frames_.push_back(std::move(outgoing));
}

void MessageSender::finish() {
  if (last_frame_ == End::kNone) last_frame_ = End::kDue;
}

void MessageSender::send_frame(MessageFrame::Kind kind, uint64_t id, uint64_t num_bytes) {
  if (last_frame_ == End::kSent) return;
  Outgoing outgoing;
  outgoing.frame.kind = kind;
  outgoing.frame.id = id;
  outgoing.frame.num_bytes = num_bytes;
  frames_.push_back(std::move(outgoing));
}

void MessageSender::send_broken(const std::string& why) {
  if (last_frame_ == End::kSent) return;
  Outgoing outgoing;
  outgoing.frame.kind = MessageFrame::Kind::kBroken;
  outgoing.frame.num_bytes = std::min<uint64_t>(why.size(), kFragmentBytes);
  outgoing.payload = why.data();
  frames_.push_front(std::move(outgoing));
}

bool MessageSender::begin_message(uint64_t id) {
  const auto found = announced_.find(id);
  if (found == announced_.end() || found->second->header.num_bytes == 0) return false;
  if (last_frame_ == End::kSent) return true;
  messages_.push_back(Fragments{std::move(found->second), id, 0});
  announced_.erase(found);
  return true;
}

bool MessageSender::drop_message(uint64_t id, Status status) {
  const auto found = announced_.find(id);
  if (found == announced_.end()) return false;
  const MessageRequestPtr request = std::move(found->second);
  announced_.erase(found);
  events_.on_end(*request, std::move(status), request->header);
  return true;
}

MessageSender::Outgoing MessageSender::next_frame() {
  if (frames_.empty() && messages_.empty()) {
    last_frame_ = End::kSent;
    Outgoing last;
    last.frame.kind = MessageFrame::Kind::kEnd;
    return last;
  }
  if (frames_.empty() || (num_in_a_row_ >= kMostInARow && !messages_.empty())) return next_fragment();
  ++num_in_a_row_;
  Outgoing outgoing = std::move(frames_.front());
  frames_.pop_front();
  return outgoing;
}

MessageSender::Outgoing MessageSender::next_fragment() {
  num_in_a_row_ = 0;
  Fragments message = std::move(messages_.front());
  messages_.pop_front();
  const uint64_t num_bytes = message.request->header.num_bytes;
  Outgoing outgoing;
  outgoing.frame.kind = MessageFrame::Kind::kData;
  outgoing.frame.id = message.id;
  outgoing.frame.offset = message.offset;
  outgoing.frame.num_bytes = std::min<uint64_t>(kFragmentBytes, num_bytes - message.offset);
  outgoing.payload = message.request->data + message.offset;
  message.offset += outgoing.frame.num_bytes;
  if (message.offset == num_bytes) {
    outgoing.last_of = std::move(message.request);
  } else {
    messages_.push_back(std::move(message));
  }
  return outgoing;
}

void MessageSender::progress(bool* progressed) {
  if (is_sending_ && stream_.has_sent(end_)) {
    is_sending_ = false;
    *progressed = true;
    const MessageRequestPtr request = std::move(sending_.last_of);
    if (request != nullptr) events_.on_end(*request, Status(), request->header);
  }
  if (is_sending_ || !has_frames()) return;
  sending_ = next_frame();
  is_sending_ = true;
  *progressed = true;
  coder_.encode(sending_.frame, header_);
  stream_.send(header_, sizeof header_);
  end_ = stream_.send(sending_.payload, sending_.frame.payload_bytes());
}

void MessageSender::copy(bool* progressed) {
  JointCopy* joint = stream_.sent_copy();
  JointCopy::Piece piece;
  if (joint == nullptr || !joint->claim(&piece)) return;
  *progressed = true;
  const auto found = announced_.find(piece.id);
  const bool may_copy = found != announced_.end() && joint->is_open();
  joint->end(piece, may_copy && stream_.copy_to(piece.address, found->second->data + piece.offset, piece.num_bytes));
}

bool MessageSender::has_requests() const {
  const auto has_request = [](const Outgoing& frame) { return frame.last_of != nullptr; };
  return !messages_.empty() || !announced_.empty() || (is_sending_ && has_request(sending_)) ||
         std::any_of(frames_.begin(), frames_.end(), has_request);
}

void MessageSender::take_all(std::vector<MessageRequestPtr>* requests) {
  const auto take = [&](MessageRequestPtr& request) {
    if (request != nullptr) requests->push_back(std::move(request));
  };
  take(sending_.last_of);
  for (Outgoing& frame : frames_) take(frame.last_of);
  for (Fragments& message : messages_) take(message.request);
  for (auto& [id, request] : announced_) take(request);
  frames_.clear();
  messages_.clear();
  announced_.clear();
}

}  // namespace hvl
