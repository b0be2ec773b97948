#include "p2p/peer_link.h"

#include <utility>

namespace hvl {

namespace {

constexpr int kRounds = 64;  // of one call of progress()

}  // namespace

PeerLink::PeerLink(int rank, const std::string& peer, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
                   MessageEvents* events)
    : rank_(rank),
      peer_(peer),
      stream_(std::move(stream)),
      coder_(keys, peer),
      events_(*events),
      sender_(stream_.get(), &coder_, events),
      eager_(new char[kEagerBytes]) {
  await_header();
}

void PeerLink::await_header() {
  awaits_payload_ = false;
  end_ = stream_->receive(header_, sizeof header_);
}

void PeerLink::request(uint64_t id, const MessageHeader& message, MessageRequestPtr receive) {
  if (message.num_bytes == 0) {
    decline(id, MessageFrame::Kind::kDone);
    events_.on_end(*receive, Status(), message);
    return;
  }
  incoming_[id] = Incoming{std::move(receive), message, 0};
  sender_.send_frame(MessageFrame::Kind::kRequest, id);
}

void PeerLink::give_credit(uint64_t num_bytes) {
  credit_to_give_ += credit_of(num_bytes);
  if (credit_to_give_ < kMessageCredit / 2) return;
  sender_.send_frame(MessageFrame::Kind::kCredit, 0, credit_to_give_);
  credit_to_give_ = 0;
}

Status PeerLink::progress(bool* progressed) {
  Status status;
  bool moved = true;
  for (int round = 0; status.ok() && moved && round < kRounds; ++round) {
    moved = false;
    sender_.progress(&moved);
    status = stream_->progress(&moved);
    is_lost_ = !status.ok();
    while (status.ok() && stream_->has_received(end_)) status = take();
    *progressed |= moved;
  }
  return status;
}

// What was awaited has come.
Status PeerLink::take() {
  if (!awaits_payload_) {
    const Status status = coder_.decode(header_, &frame_);
    return status.ok() ? begin_frame() : status;
  }
  end_payload();
  await_header();
  return Status();
}

Status PeerLink::begin_frame() {
  using Kind = MessageFrame::Kind;
  Status status;
  switch (frame_.kind) {
    case Kind::kEager:
      awaits_payload_ = true;
      end_ = stream_->receive(eager_.get(), frame_.num_bytes);
      return status;
    case Kind::kData: return begin_data();
    case Kind::kAnnounce: events_.on_announcement(frame_.header_from(rank_), frame_.id); break;
    case Kind::kRequest: status = answered(sender_.begin_message(frame_.id)); break;
    case Kind::kDone: status = answered(sender_.drop_message(frame_.id, Status())); break;
    case Kind::kRemoved:
      status = answered(sender_.drop_message(
          frame_.id, Status(HVL_INVALID_ARGUMENT, "the process set of a message to " + peer_ + " has been removed")));
      break;
    case Kind::kCredit: sender_.add_credit(frame_.num_bytes); break;
    case Kind::kEnd: has_ended_ = true; break;
  }
  await_header();
  return status;
}

Status PeerLink::begin_data() {
  const auto found = incoming_.find(frame_.id);
  if (found == incoming_.end()) return wrong("a fragment of a message that was not asked for");
  const Incoming& incoming = found->second;
  if (frame_.offset != incoming.num_received || frame_.num_bytes > incoming.message.num_bytes - frame_.offset) {
    return wrong("a fragment that is not the next one of its message");
  }
  awaits_payload_ = true;
  end_ = stream_->receive(incoming.receive->data + frame_.offset, frame_.num_bytes);
  return Status();
}

void PeerLink::end_payload() {
  if (frame_.kind == MessageFrame::Kind::kEager) {
    if (events_.on_message(frame_.header_from(rank_), eager_.get())) give_credit(frame_.num_bytes);
    return;
  }
  const auto found = incoming_.find(frame_.id);
  found->second.num_received += frame_.num_bytes;
  if (found->second.num_received < found->second.message.num_bytes) return;
  const Incoming ended = std::move(found->second);
  incoming_.erase(found);
  events_.on_end(*ended.receive, Status(), ended.message);
}

Status PeerLink::answered(bool is_known) const {
  return is_known ? Status() : wrong("an answer to a message that was not announced");
}

Status PeerLink::wrong(const std::string& what) const {
  return Status(HVL_JOB_BROKEN, "Protocol error: " + peer_ + " has sent " + what);
}

void PeerLink::take_all(std::vector<MessageRequestPtr>* requests) {
  is_lost_ = true;
  sender_.take_all(requests);
  for (auto& [id, incoming] : incoming_) requests->push_back(std::move(incoming.receive));
  incoming_.clear();
}

}  // namespace hvl
