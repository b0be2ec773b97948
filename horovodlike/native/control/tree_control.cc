#include "control/tree_control.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "sync/waiter.h"

namespace hvl {

TreeLeader::TreeLeader(std::shared_ptr<HostMemory> memory, std::vector<int> ranks, std::vector<int> pids,
                       std::vector<std::unique_ptr<Connection>> connections, bool has_parent)
    : memory_(memory),
      stacks_(memory, std::move(pids), ranks),
      rings_(std::move(memory)),
      ranks_(std::move(ranks)),
      connections_(std::move(connections)),
      first_child_(has_parent ? 1 : 0) {}

Status TreeLeader::accept_local(int local_rank, const Message& message, uint64_t sent) {
  message_ = message;
  const uint64_t now = now_ns();
  message_.speak_for(ranks_[static_cast<size_t>(local_rank)], now - std::min(sent, now));
  return accept(message_, now);
}

Status TreeLeader::take_frame(size_t from) {
  const bool from_parent = from < first_child_;
  if (frame_.empty()) return Status(HVL_JOB_BROKEN, "Protocol error: an empty frame between hosts.");
  const Frame type = static_cast<Frame>(frame_[0]);
  const char* body = frame_.data() + 1;
  const size_t length = frame_.size() - 1;
  Status status;
  if (type == Frame::kBroken) return Status(HVL_JOB_BROKEN, frame_.substr(1));
  if (type == Frame::kInquiry && from_parent) {
    show_inquiry();
    if (!is_asked_) stacks_.ask(ranks_, now_ns());
    is_asked_ = true;
    return status;
  }
  if (type == Frame::kStacks && !from_parent && length >= sizeof(int)) {
    int rank = 0;
    memcpy(&rank, body, sizeof rank);
    if (first_child_ == 0) stacks_.take(rank, frame_.substr(1 + sizeof rank));
    if (first_child_ == 1) connections_.front()->send(frame_);
    return status;
  }
  if (type == Frame::kMoved) {
    memory_->header().moved_elsewhere.store(now_ns());
    send_frame(0, from);
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

// The rank that broke the job sends the reason before its connections are lost: an error from a frame has precedence.
Status TreeLeader::receive_all(bool* progressed) {
  const uint64_t moved = memory_->header().moved_here.load();
  if (moved >= told_moved_ + kMovedInterval && !is_finished_) {
    told_moved_ = moved;
    begin_frame(Frame::kMoved);
    send_frame(0);
  }
  if (is_asked_ && !is_finished_ && stacks_.is_over(now_ns())) {
    is_asked_ = false;
    for (const StackDumpRequests::Question& each : stacks_.questions()) {
      begin_frame(Frame::kStacks);
      frame_.append(reinterpret_cast<const char*>(&each.rank), sizeof each.rank);
      connections_.front()->send(frame_ + stacks_.answer_of(each));
    }
  }
  Status status = pump_connections(progressed);
  for (size_t index = 0; index < connections_.size(); ++index) {
    Status received;
    while (received.ok() && connections_[index]->receive(&frame_)) {
      *progressed = true;
      if (!is_finished_) received = take_frame(index);  // else it comes too late
    }
    if (!received.ok()) status = received;
  }
  return status;
}

Status TreeLeader::pump_connections(bool* progressed) {
  Status first;
  for (const auto& connection : connections_) {
    const bool may_end = log_has_ended_ || is_finished_;
    Status status = connection->pump(progressed);
    if (status.ok() && !may_end && connection->has_ended()) {
      status = Status(HVL_JOB_BROKEN, "the connection to " + connection->peer() + " has ended before the job");
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
  status = receive_all(progressed);
  if (status.ok() && !is_finished_ && has_to_decide()) status = decide();
  rings_.pump(progressed);
  const Status sent = pump_connections(progressed);
  return status.ok() ? sent : status;
}

void TreeLeader::publish(Record record, const std::vector<int>& concerned_ranks) {
  std::vector<int> concerned;
  for (size_t local_rank = 0; local_rank < ranks_.size() && !concerned_ranks.empty(); ++local_rank) {
    const bool is_concerned = std::binary_search(concerned_ranks.begin(), concerned_ranks.end(), ranks_[local_rank]);
    if (is_concerned || local_rank == 0) concerned.push_back(static_cast<int>(local_rank));
  }
  if (first_child_ < connections_.size()) {
    begin_frame(Frame::kRecord);
    encode(record, &frame_);
    send_frame(first_child_);
  }
  log_has_ended_ |= record.type == Record::Type::kShutdown;
  rings_.publish(std::move(record), concerned);
}

void TreeLeader::send_up(const Message& message) {
  begin_frame(Frame::kMessage);
  encode(message, &frame_);
  connections_.front()->send(frame_);
}

void TreeLeader::send_frame(size_t first, size_t except) {
  for (size_t index = first; index < connections_.size(); ++index) {
    if (index != except) connections_[index]->send(frame_);
  }
}

void TreeLeader::show_inquiry() {
  rings_.show_inquiry();
  begin_frame(Frame::kInquiry);
  send_frame(first_child_);
}

// True if there is a next record, and all ranks that receive it from this one can read it.
bool TreeLeader::next_is_public() const {
  return rings_.has_next() &&
         std::all_of(connections_.begin() + static_cast<std::ptrdiff_t>(first_child_), connections_.end(),
                     [](const auto& child) { return child->is_flushed() || child->is_over(); });
}

Status TreeLeader::next(Record* record, bool* found) {
  *found = next_is_public() && rings_.next(record);
  return Status();
}

// Also receives from the sockets: a thread checks this condition while it spins, and before it sleeps.
bool TreeLeader::has_news() {
  if (next_is_public() || has_to_decide() || rings_.has_news()) return true;
  bool progressed = false;
  if (!pump_connections(&progressed).ok()) return true;  // pump() will return the error
  return std::any_of(connections_.begin(), connections_.end(), [](const auto& each) { return each->has_frame(); });
}

bool TreeLeader::is_flushed() {
  return rings_.is_flushed() && std::all_of(connections_.begin(), connections_.end(), [this](const auto& each) {
           return each->is_over() || (!is_finished_ && each->is_flushed());
         });
}

void TreeLeader::finish() {
  if (is_finished_) return;
  is_finished_ = true;
  for (const auto& connection : connections_) connection->finish();
}

// Only accepts messages that have arrived: decide() acts on them when the collective is over.
Status TreeLeader::check_other_hosts() {
  bool progressed = false;
  return receive_all(&progressed);
}

void TreeLeader::tell_broken(const std::string& text) {
  if (is_finished_) return;
  begin_frame(Frame::kBroken);
  frame_ += text;
  for (const auto& connection : connections_) connection->send(frame_);
  bool progressed = false;
  finish();
  pump_connections(&progressed);
}

void TreeLeader::close_in_child() {
  for (const auto& connection : connections_) connection->close();
}

TreeRoot::TreeRoot(std::shared_ptr<HostMemory> memory, const CoordinatorHostOptions& options, std::vector<int> ranks,
                   std::vector<int> pids, std::vector<std::unique_ptr<Connection>> children)
    : TreeLeader(std::move(memory), std::move(ranks), std::move(pids), std::move(children), false),
      coordinator_host_(options) {}

Status TreeRoot::decide() {
  coordinator_host_.decide([this](Decision&& decision) { publish(std::move(decision.record), decision.concerned); });
  show(coordinator_host_.straggler_stats());
  return Status();
}

TreeNode::TreeNode(std::shared_ptr<HostMemory> memory, std::vector<int> ranks, std::vector<int> pids, RankSet below,
                   std::vector<std::unique_ptr<Connection>> connections)
    : TreeLeader(std::move(memory), std::move(ranks), std::move(pids), std::move(connections), true),
      aggregator_(AggregatorOptions{std::move(below)}) {}

Status TreeNode::decide() {
  messages_.clear();
  aggregator_.take(now_ns(), &messages_);
  for (const Message& message : messages_) send_up(message);
  return Status();
}

}  // namespace hvl
