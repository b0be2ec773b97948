#include "control/tree_control.h"

#include <algorithm>
#include <utility>

namespace hvl {

TreeLeader::TreeLeader(std::shared_ptr<HostMemory> memory, std::vector<int> ranks, std::unique_ptr<Channel> parent,
                       std::vector<std::unique_ptr<Channel>> children)
    : rings_(std::move(memory)), ranks_(std::move(ranks)), parent_(std::move(parent)), children_(std::move(children)) {}

template <typename Visit>
void TreeLeader::for_each_channel(Visit&& visit) {
  if (parent_ != nullptr) visit(parent_.get());
  for (const auto& child : children_) visit(child.get());
}

template <typename Check>
bool TreeLeader::any_channel(Check&& check) const {
  return (parent_ != nullptr && check(*parent_)) ||
         std::any_of(children_.begin(), children_.end(), [&](const auto& child) { return check(*child); });
}

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
    publish(record_, {});
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
  for_each_channel([&](Channel* channel) {
    const bool may_end = log_has_ended_ || is_finished_;
    Status status = channel->pump(progressed);
    if (status.ok() && !may_end && channel->has_ended()) {
      status = Status(HVL_JOB_BROKEN, "the connection to " + channel->peer() + " has ended before the job");
    }
    if (first.ok()) first = status;
  });
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
  for_each_channel([&](Channel* channel) {
    const Status received = receive_from(channel, progressed);
    if (!received.ok()) status = received;
  });
  if (status.ok() && !is_finished_ && has_to_decide()) status = decide();
  rings_.pump(progressed);
  const Status sent = pump_channels(progressed);
  return status.ok() ? sent : status;
}

void TreeLeader::publish(const Record& record, const std::vector<int>& concerned_ranks) {
  std::vector<int> concerned;
  for (size_t local_rank = 0; local_rank < ranks_.size() && !concerned_ranks.empty(); ++local_rank) {
    const bool is_concerned = std::binary_search(concerned_ranks.begin(), concerned_ranks.end(), ranks_[local_rank]);
    if (is_concerned || local_rank == 0) concerned.push_back(static_cast<int>(local_rank));
  }
  record_ends_.push_back(rings_.publish(record, concerned));
  if (!children_.empty()) {
    begin_frame(Frame::kRecord);
    encode(record, &frame_);
    for (const auto& child : children_) child->send(frame_);
  }
  log_.push_back(record);
  log_has_ended_ |= record.type == Record::Type::kShutdown;
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

bool TreeLeader::next_is_public() const {
  return !log_.empty() && rings_.has_written(record_ends_.front()) &&
         std::all_of(children_.begin(), children_.end(),
                     [](const auto& child) { return child->is_flushed() || child->is_over(); });
}

Status TreeLeader::next(Record* record, bool* found) {
  *found = next_is_public();
  if (!*found) return Status();
  *record = std::move(log_.front());
  log_.pop_front();
  record_ends_.pop_front();
  return Status();
}

// Polls the kernel, too: a thread checks this condition while it spins, and before it sleeps.
bool TreeLeader::has_news() {
  if (next_is_public() || has_to_decide() || rings_.has_news()) return true;
  bool progressed = false;
  if (!pump_channels(&progressed).ok()) return true;  // pump() finds the error, too
  return any_channel([](const Channel& channel) { return channel.has_frame(); });
}

bool TreeLeader::is_flushed() {
  if (!rings_.is_flushed()) return false;
  return !any_channel(
      [this](const Channel& channel) { return !channel.is_over() && (is_finished_ || !channel.is_flushed()); });
}

void TreeLeader::finish() {
  if (is_finished_) return;
  is_finished_ = true;
  for_each_channel([](Channel* channel) { channel->finish(); });
}

// Only accepts what has arrived: decide() acts on it when the collective is over.
Status TreeLeader::check_other_hosts() {
  bool progressed = false;
  Status status = pump_channels(&progressed);
  // The rank that broke the job first sends the reason before its connections are lost.
  for_each_channel([&](Channel* channel) {
    const Status received = receive_from(channel, &progressed);
    if (!received.ok()) status = received;
  });
  return status;
}

void TreeLeader::tell_broken(const std::string& text) {
  if (is_finished_) return;
  begin_frame(Frame::kBroken);
  frame_ += text;
  for_each_channel([this](Channel* channel) { channel->send(frame_); });
  bool progressed = false;
  finish();
  pump_channels(&progressed);
}

void TreeLeader::close_in_child() {
  for_each_channel([](Channel* channel) { channel->close(); });
}

TreeRoot::TreeRoot(std::shared_ptr<HostMemory> memory, const CoordinatorHostOptions& options, std::vector<int> ranks,
                   std::vector<int> pids, std::vector<std::vector<int>> relays,
                   std::vector<std::unique_ptr<Channel>> children)
    : TreeLeader(memory, ranks, nullptr, std::move(children)),
      coordinator_host_(options),
      questions_(memory, std::move(pids), std::move(ranks), std::move(relays)) {}

Status TreeRoot::decide() {
  coordinator_host_.decide([this](const Decision& decision) { publish(decision.record, decision.concerned); });
  Record already_published;
  while (coordinator_host_.next(&already_published)) {
  }
  rings().show(coordinator_host_.lateness(), ranks());
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
