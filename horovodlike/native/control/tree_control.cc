#include "control/tree_control.h"

#include <algorithm>
#include <utility>

namespace hvl {

namespace {

std::vector<Channel*> neighbours_of(const std::unique_ptr<Channel>& parent,
                                    const std::vector<std::unique_ptr<Channel>>& children) {
  std::vector<Channel*> neighbours;
  if (parent != nullptr) neighbours.push_back(parent.get());
  for (const auto& child : children) neighbours.push_back(child.get());
  return neighbours;
}

}  // namespace

TreeLeader::TreeLeader(std::shared_ptr<HostMemory> memory, std::vector<int> ranks, std::unique_ptr<Channel> parent,
                       std::vector<std::unique_ptr<Channel>> children)
    : rings_(std::move(memory)),
      ranks_(std::move(ranks)),
      parent_(std::move(parent)),
      children_(std::move(children)),
      neighbours_(neighbours_of(parent_, children_)) {}

Status TreeLeader::accept_local(int local_rank, const Message& message, uint64_t sent) {
  message_ = message;
  const uint64_t now = now_ns();
  message_.speak_for(ranks_[static_cast<size_t>(local_rank)], now - std::min(sent, now));
  return accept(message_, now);
}

Status TreeLeader::take_frame(bool from_parent) {
  if (frame_.empty()) return Status(HVL_JOB_BROKEN, "Protocol error: an empty frame between hosts.");
  const Frame type = static_cast<Frame>(frame_[0]);
  const char* body = frame_.data() + 1;
  const size_t length = frame_.size() - 1;
  Status status;
  if (type == Frame::kBroken) return Status(HVL_JOB_BROKEN, frame_.substr(1));
  if (type == Frame::kInquiry && from_parent) {
    show_inquiry();
    return status;
  }
  if (type == Frame::kMessage && !from_parent) {
    message_ = Message();
    status = decode(body, length, &message_);
    return status.ok() ? accept(message_, now_ns()) : status;
  }
  if (type == Frame::kRecord && from_parent) {
    record_ = Record();
    status = decode(body, length, &record_);
    if (!status.ok()) return status;
    observe(record_);
    publish(std::move(record_), {});
    return status;
  }
  return Status(HVL_JOB_BROKEN, "Protocol error: a frame of an unknown type between hosts.");
}

Status TreeLeader::receive_from(Channel* channel, bool* progressed) {
  while (channel->receive(&frame_)) {
    *progressed = true;
    if (is_finished_) continue;  // too late
    Status status = take_frame(channel == parent_.get());
    if (!status.ok()) return status;
  }
  return Status();
}

Status TreeLeader::pump_channels(bool* progressed) {
  Status first;
  for (Channel* channel : neighbours_) {
    const bool may_end = log_has_ended_ || is_finished_;
    Status status = channel->pump(progressed);
    if (status.ok() && !may_end && channel->has_ended()) {
      status = Status(HVL_JOB_BROKEN, "the connection to " + channel->peer() + " has ended before the job");
    }
    if (first.ok()) first = status;
  }
  return log_has_ended_ || is_finished_ ? Status() : first;
}

Status TreeLeader::pump(bool* progressed) {
  const auto take = [this](int local_rank, const Message& message, uint64_t sent) {
    return is_finished_ ? Status() : accept_local(local_rank, message, sent);
  };
  Status status = rings_.receive(take, progressed);
  if (!status.ok()) return status;
  status = pump_channels(progressed);
  // A frame that arrived before a connection was lost may contain the reason.
  for (Channel* channel : neighbours_) {
    const Status received = receive_from(channel, progressed);
    if (!received.ok()) status = received;
  }
  if (status.ok() && !is_finished_ && has_to_decide()) status = decide();
  rings_.pump(progressed);
  const Status sent = pump_channels(progressed);
  return status.ok() ? sent : status;
}

void TreeLeader::publish(Record record, const std::vector<int>& concerned_ranks) {
  std::vector<int> concerned;
  for (size_t local_rank = 0; local_rank < ranks_.size() && !concerned_ranks.empty(); ++local_rank) {
    const bool is_concerned = std::binary_search(concerned_ranks.begin(), concerned_ranks.end(), ranks_[local_rank]);
    if (is_concerned || local_rank == 0) concerned.push_back(static_cast<int>(local_rank));
  }
  if (!children_.empty()) {
    begin_frame(Frame::kRecord);
    encode(record, &frame_);
    for (const auto& child : children_) child->send(frame_);
  }
  log_has_ended_ |= record.type == Record::Type::kShutdown;
  rings_.publish(std::move(record), concerned);
}

void TreeLeader::send_up(const Message& message) {
  begin_frame(Frame::kMessage);
  encode(message, &frame_);
  parent_->send(frame_);
}

void TreeLeader::show_inquiry() {
  rings_.show_inquiry();
  begin_frame(Frame::kInquiry);
  for (const auto& child : children_) child->send(frame_);
}

// All others that receive the next record from here can read it.
bool TreeLeader::next_is_public() const {
  return rings_.has_next() && std::all_of(children_.begin(), children_.end(),
                                          [](const auto& child) { return child->is_flushed() || child->is_over(); });
}

Status TreeLeader::next(Record* record, bool* found) {
  *found = next_is_public() && rings_.next(record);
  return Status();
}

// Polls the kernel, too: a thread checks this condition while it spins, and before it sleeps.
bool TreeLeader::has_news() {
  if (next_is_public() || has_to_decide() || rings_.has_news()) return true;
  bool progressed = false;
  if (!pump_channels(&progressed).ok()) return true;  // pump() finds the error, too
  return std::any_of(neighbours_.begin(), neighbours_.end(),
                     [](const Channel* channel) { return channel->has_frame(); });
}

bool TreeLeader::is_flushed() {
  if (!rings_.is_flushed()) return false;
  return std::all_of(neighbours_.begin(), neighbours_.end(), [this](const Channel* channel) {
    return channel->is_over() || (!is_finished_ && channel->is_flushed());
  });
}

void TreeLeader::finish() {
  if (is_finished_) return;
  is_finished_ = true;
  for (Channel* channel : neighbours_) channel->finish();
}

// Only accepts what has arrived: decide() acts on it when the collective is over.
Status TreeLeader::check_other_hosts() {
  bool progressed = false;
  Status status = pump_channels(&progressed);
  // The rank that broke the job first sends the reason before its connections are lost.
  for (Channel* channel : neighbours_) {
    const Status received = receive_from(channel, &progressed);
    if (!received.ok()) status = received;
  }
  return status;
}

void TreeLeader::tell_broken(const std::string& text) {
  if (is_finished_) return;
  begin_frame(Frame::kBroken);
  frame_ += text;
  for (Channel* channel : neighbours_) channel->send(frame_);
  bool progressed = false;
  finish();
  pump_channels(&progressed);
}

void TreeLeader::close_in_child() {
  for (Channel* channel : neighbours_) channel->close();
}

TreeRoot::TreeRoot(std::shared_ptr<HostMemory> memory, const CoordinatorHostOptions& options, std::vector<int> ranks,
                   std::vector<int> pids, std::vector<std::vector<int>> relays,
                   std::vector<std::unique_ptr<Channel>> children)
    : TreeLeader(memory, ranks, nullptr, std::move(children)),
      coordinator_host_(options),
      questions_(memory, std::move(pids), std::move(ranks), std::move(relays)) {}

Status TreeRoot::decide() {
  coordinator_host_.decide([this](Decision&& decision) { publish(std::move(decision.record), decision.concerned); });
  show(coordinator_host_.straggler_stats());
  return Status();
}

TreeNode::TreeNode(std::shared_ptr<HostMemory> memory, std::vector<int> ranks, RankSet below,
                   std::unique_ptr<Channel> parent, std::vector<std::unique_ptr<Channel>> children)
    : TreeLeader(std::move(memory), std::move(ranks), std::move(parent), std::move(children)),
      aggregator_(AggregatorOptions{std::move(below)}) {}

Status TreeNode::decide() {
  messages_.clear();
  aggregator_.take(now_ns(), &messages_);
  for (const Message& message : messages_) send_up(message);
  return Status();
}

}  // namespace hvl
