#include "p2p/peer_link.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace hvl {

namespace {

constexpr int kRounds = 16;  // most rounds in one call of progress()

}  // namespace

PeerLink::PeerLink(int rank, const std::string& peer, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
                   MessageEvents* events)
    : rank_(rank),
      stream_(std::move(stream)),
      coder_(keys, peer),
      events_(*events),
      sender_(stream_.get(), &coder_, events),
      receiver_(stream_.get(), &sender_, events),
      payload_(kEagerBytes) {
  await_header();
}

void PeerLink::await_header() {
  awaits_payload_ = false;
  end_ = stream_->receive(header_, sizeof header_);
}

void PeerLink::await_payload(char* memory) {
  awaits_payload_ = true;
  end_ = stream_->receive(memory, frame_.num_bytes);
}

void PeerLink::give_credit(uint64_t num_bytes) {
  credit_to_give_ += credit_of(num_bytes);
  if (credit_to_give_ < kMessageCredit / 2) return;
  sender_.send_frame(MessageFrame::Kind::kCredit, 0, credit_to_give_);
  credit_to_give_ = 0;
}

void PeerLink::finish() {
  uint64_t moved_at = now_ns();
  while (receiver_.is_copying() && now_ns() - moved_at < kTimeToSayWhy) {  // the sender waits for kDone frames
    bool progressed = false;
    receiver_.copy(&progressed);
    if (progressed) {
      moved_at = now_ns();
    } else {
      sched_yield();
    }
  }
  sender_.finish();
}

void PeerLink::tell_broken(const std::string& why) {
  if (is_lost_) return;
  sender_.send_broken(why);
  bool moved = true;
  for (int round = 0; moved && round < kRounds; ++round) {
    moved = false;
    sender_.progress(&moved);
    if (!stream_->progress(&moved).ok()) return;  // the peer will see itself that the connection is lost
  }
}

Status PeerLink::progress(bool* progressed) {
  Status status;
  bool moved = true;
  for (int round = 0; status.ok() && moved && round < kRounds && !receiver_.take_ended(); ++round) {
    moved = false;
    receiver_.copy(&moved);
    sender_.copy(&moved);
    sender_.progress(&moved);
    status = stream_->progress(&moved);
    is_lost_ = status.is_lost();
    while (status.ok() && stream_->has_received(end_)) status = take();
    *progressed |= moved;
  }
  has_more_ = moved;
  return status;
}

// Handles the awaited bytes, which have arrived: a header or a payload.
Status PeerLink::take() {
  if (!awaits_payload_) {
    const Status status = coder_.decode(header_, &frame_);
    if (!status.ok()) return status;
    return has_ended_ ? wrong("a frame behind its last one") : begin_frame();
  }
  if (frame_.kind == MessageFrame::Kind::kBroken) {
    return Status(HVL_JOB_BROKEN, std::string(payload_.data(), frame_.num_bytes));
  }
  end_payload();
  await_header();
  return Status();
}

Status PeerLink::begin_frame() {
  using Kind = MessageFrame::Kind;
  Status status;
  switch (frame_.kind) {
    case Kind::kEager: await_payload(payload_.data()); return status;
    case Kind::kBroken:
      payload_.resize(std::max<size_t>(payload_.size(), frame_.num_bytes));
      await_payload(payload_.data());
      return status;
    case Kind::kData: {
      char* memory = receiver_.memory_for(frame_);
      if (memory == nullptr) return wrong("a fragment of a message that was not asked for, or not the next one");
      await_payload(memory);
      return status;
    }
    case Kind::kAnnounce:
      events_.on_announcement(frame_.header_from(rank_), Announcement{frame_.id, frame_.offset});
      break;
    case Kind::kRequest: status = answered(sender_.begin_message(frame_.id)); break;
    case Kind::kDone: status = answered(sender_.drop_message(frame_.id, Status())); break;
    case Kind::kRemoved:
      status = answered(sender_.drop_message(
          frame_.id,
          Status(HVL_INVALID_ARGUMENT, "the process set of a message to " + coder_.peer() + " has been removed")));
      break;
    case Kind::kCredit: sender_.add_credit(frame_.num_bytes); break;
    case Kind::kEnd: has_ended_ = true; break;
  }
  await_header();
  return status;
}

void PeerLink::end_payload() {
  if (frame_.kind == MessageFrame::Kind::kEager) {
    if (events_.on_message(frame_.header_from(rank_), payload_.data())) give_credit(frame_.num_bytes);
  } else {
    receiver_.end_fragment(frame_);
  }
}

Status PeerLink::answered(bool is_known) const {
  return is_known ? Status() : wrong("an answer to a message that was not announced");
}

Status PeerLink::wrong(const std::string& what) const {
  return Status(HVL_JOB_BROKEN, "Protocol error: " + coder_.peer() + " has sent " + what);
}

void PeerLink::take_all(std::vector<MessageRequestPtr>* requests) {
  is_lost_ = true;
  sender_.take_all(requests);
  receiver_.take_all(requests);
}

}  // namespace hvl
