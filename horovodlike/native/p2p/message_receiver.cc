#include "p2p/message_receiver.h"

#include <algorithm>
#include <utility>

namespace hvl {

namespace {

constexpr uint64_t kLeastJointBytes = 4 * kPieceBytes;

}  // namespace

void MessageReceiver::request(const Announcement& announcement, const MessageHeader& message,
                              MessageRequestPtr receive) {
  Incoming incoming{std::move(receive), message, announcement, 0};
  if (message.num_bytes == 0 || (may_copy_ && announcement.address != 0)) {
    copied_.push_back(std::move(incoming));
    begin_jointly();
  } else {
    request_fragments(std::move(incoming));
  }
}

void MessageReceiver::request_fragments(Incoming incoming) {
  const uint64_t id = incoming.announcement.id;
  incoming.num_received = 0;
  fragmented_[id] = std::move(incoming);
  answers_.send_frame(MessageFrame::Kind::kRequest, id);
}

bool MessageReceiver::can_copy() const {
  if (jointly_.receive == nullptr) return !copied_.empty();
  const JointCopy& joint = *stream_.received_copy();
  const bool can_copy_alone =
      std::any_of(copied_.begin(), copied_.end(), [&](const auto& each) { return !waits_for_turn(each); });
  return can_copy_alone || joint.has_pieces() || joint.is_complete();
}

bool MessageReceiver::waits_for_turn(const Incoming& incoming) const {
  return jointly_.receive != nullptr && jointly_.message.num_bytes <= kLeastJointBytes && can_be_joint(incoming);
}

bool MessageReceiver::can_be_joint(const Incoming& incoming) const {
  return may_copy_ && may_sender_copy_ && incoming.num_received == 0 &&
         incoming.message.num_bytes >= kLeastJointBytes && stream_.received_copy() != nullptr;
}

void MessageReceiver::begin_jointly() {
  if (jointly_.receive != nullptr) return;
  const auto next = std::find_if(copied_.begin(), copied_.end(), [&](const auto& each) { return can_be_joint(each); });
  if (next == copied_.end()) return;
  jointly_ = std::move(*next);
  copied_.erase(next);
  stream_.received_copy()->begin(jointly_.announcement.id, jointly_.receive->data, jointly_.message.num_bytes);
}

void MessageReceiver::copy(bool* progressed) {
  begin_jointly();
  copy_jointly(progressed);
  copy_alone(progressed);
}

void MessageReceiver::copy_jointly(bool* progressed) {
  if (jointly_.receive == nullptr) return;
  JointCopy& joint = *stream_.received_copy();
  JointCopy::Piece piece;
  if (joint.claim(&piece)) {
    *progressed = true;
    joint.add(piece);
    char* to = jointly_.receive->data + piece.offset;
    if (!stream_.copy_from(jointly_.announcement.address + piece.offset, to, piece.num_bytes)) {
      joint.close();
      may_copy_ = false;
      return request_fragments(std::exchange(jointly_, Incoming()));
    }
  }
  if (!joint.is_complete()) return;
  *progressed = true;
  Incoming incoming = std::exchange(jointly_, Incoming());
  if (!joint.has_failed()) {
    begin_jointly();  // the sender copies the next one while this one is used
    has_ended_ = true;
    return end_copy(incoming);
  }
  may_sender_copy_ = false;
  copied_.push_back(std::move(incoming));
}

void MessageReceiver::copy_alone(bool* progressed) {
  const auto next =
      std::find_if(copied_.begin(), copied_.end(), [&](const auto& each) { return !waits_for_turn(each); });
  if (next == copied_.end()) return;
  *progressed = true;
  Incoming incoming = std::move(*next);
  copied_.erase(next);
  const uint64_t num_bytes = std::min(kPieceBytes, incoming.message.num_bytes - incoming.num_received);
  const uint64_t from = incoming.announcement.address + incoming.num_received;
  if (num_bytes > 0 && !stream_.copy_from(from, incoming.receive->data + incoming.num_received, num_bytes)) {
    may_copy_ = false;
    return request_fragments(std::move(incoming));
  }
  incoming.num_received += num_bytes;
  if (!incoming.is_complete()) return copied_.push_back(std::move(incoming));
  end_copy(incoming);
}

void MessageReceiver::end_copy(const Incoming& incoming) {
  answers_.send_frame(MessageFrame::Kind::kDone, incoming.announcement.id);
  events_.on_end(*incoming.receive, Status(), incoming.message);
}

char* MessageReceiver::memory_for(const MessageFrame& fragment) const {
  const auto found = fragmented_.find(fragment.id);
  if (found == fragmented_.end()) return nullptr;
  const Incoming& incoming = found->second;
  const bool is_next = fragment.offset == incoming.num_received &&
                       fragment.num_bytes <= incoming.message.num_bytes - incoming.num_received;
  return is_next ? incoming.receive->data + fragment.offset : nullptr;
}

void MessageReceiver::end_fragment(const MessageFrame& fragment) {
  const auto found = fragmented_.find(fragment.id);
  found->second.num_received += fragment.num_bytes;
  if (!found->second.is_complete()) return;
  const Incoming ended = std::move(found->second);
  fragmented_.erase(found);
  events_.on_end(*ended.receive, Status(), ended.message);
}

void MessageReceiver::take_all(std::vector<MessageRequestPtr>* requests) {
  if (jointly_.receive != nullptr) {
    stream_.received_copy()->close();
    requests->push_back(std::move(jointly_.receive));
  }
  for (Incoming& incoming : copied_) requests->push_back(std::move(incoming.receive));
  for (auto& [id, incoming] : fragmented_) requests->push_back(std::move(incoming.receive));
  copied_.clear();
  fragmented_.clear();
}

}  // namespace hvl
