#include "p2p/messenger.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "p2p/shm_stream.h"

namespace hvl {

namespace {

void copy_payload(const MessageHeader& message, const char* from, char* to) {
  if (message.num_bytes > 0) std::memcpy(to, from, message.num_bytes);
}

Status check_arguments(const MessageRequest& request, int size) {
  const std::string what = request.is_send ? "a send" : "a receive";
  const bool takes_any = !request.is_send && request.peer == kAnySource;
  const MessageHeader& header = request.header;
  if (!takes_any && (request.peer < 0 || request.peer >= size)) {
    return Status(HVL_INVALID_ARGUMENT, what + " has the peer " + std::to_string(request.peer) +
                                            ", but the ranks of this job are 0 to " + std::to_string(size - 1));
  }
  if (header.tag < 0) {
    return Status(HVL_INVALID_ARGUMENT, what + " has the tag " + std::to_string(header.tag) + ": use 0 at least");
  }
  if (header.dtype < 0 || header.dtype >= kNumDataTypes) {
    return Status(HVL_INVALID_ARGUMENT, what + " has the unknown dtype " + std::to_string(header.dtype));
  }
  if (header.num_bytes > INT64_MAX) return Status(HVL_INVALID_ARGUMENT, what + " has a negative number of bytes");
  if (header.num_bytes % size_of(header.dtype) != 0) {
    return Status(HVL_INVALID_ARGUMENT, what + " of " + header.describe_data() + " is no number of elements");
  }
  return Status();
}

Status compare(const MessageHeader& receive, const MessageHeader& message) {
  if (receive.dtype == message.dtype && receive.num_bytes == message.num_bytes) return Status();
  return Status(HVL_MISMATCH, "a receive of " + receive.describe_data() + " got a message of " +
                                  message.describe_data() + " from rank " + std::to_string(message.source) + ", tag " +
                                  std::to_string(message.tag) + ": both must have the same size and dtype");
}

}  // namespace

Messenger::Messenger(MessengerOptions options)
    : options_(std::move(options)), local_links_(&options_.memory->rank(options_.local_rank).message_moves) {
  std::vector<int> all_ranks(static_cast<size_t>(options_.size));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  add_process_set(0, std::move(all_ranks));
  connect();
}

void Messenger::connect() {
  links_.resize(static_cast<size_t>(options_.size));
  const auto add = [&](int rank, std::unique_ptr<PeerStream> stream, const MessageKeys* keys) {
    auto& link = links_[static_cast<size_t>(rank)];
    link = std::make_unique<PeerLink>(rank, options_.describe(rank), std::move(stream), keys,
                                      static_cast<MessageEvents*>(this));
    return link.get();
  };
  for (int peer = 0; peer < static_cast<int>(options_.local_ranks.size()); ++peer) {
    if (peer == options_.local_rank) continue;
    const int pid = options_.local_pids.empty() ? 0 : options_.local_pids[static_cast<size_t>(peer)];
    local_links_.add(add(options_.local_ranks[static_cast<size_t>(peer)],
                         std::make_unique<ShmStream>(options_.memory, options_.local_rank, peer, pid), nullptr));
  }
  if (options_.transport == nullptr) return;
  remote_links_ = std::make_unique<RemoteLinks>(options_.poller);
  for (int rank = 0; rank < options_.size; ++rank) {
    if (std::binary_search(options_.local_ranks.begin(), options_.local_ranks.end(), rank)) continue;
    std::optional<MessageKeys> keys;
    auto mesh = options_.transport->make_message_stream(rank, options_.describe(rank), &keys);
    remote_links_->add(
        add(rank, std::make_unique<MeshStream>(std::move(mesh), rank), keys.has_value() ? &*keys : nullptr));
  }
}

Status Messenger::post(MessageRequestPtr request, int64_t* handle) {
  Status status = check_arguments(*request, options_.size);
  if (!status.ok()) return status;
  request->posted_at = now_ns();
  request->handle = *handle = options_.handles->create();
  status = queue_.push(std::move(request));
  if (!status.ok()) options_.handles->discard(std::exchange(*handle, 0));
  return status;
}

void Messenger::begin(MessageRequestPtr request) {
  ++num_pending_;
  request->header.source = request->is_send ? options_.rank : request->peer;
  Status status = contexts_.find(options_.rank, request.get());
  if (!status.ok()) {
    on_end(*request, std::move(status), request->header);
  } else if (!request->is_send) {
    receive(std::move(request));
  } else if (has_ended()) {
    on_end(*request, why_it_ended_, request->header);
  } else if (request->peer == options_.rank) {
    send_to_self(std::move(request));
  } else {
    links_[static_cast<size_t>(request->peer)]->send(std::move(request));
  }
}

void Messenger::receive(MessageRequestPtr request) {
  Arrival arrival;
  if (table_.take_arrival(request->header, &arrival)) {
    deliver(std::move(arrival), std::move(request));
  } else if (has_ended()) {  // the table has only messages whose bytes are here
    on_end(*request, why_it_ended_, request->header);
  } else {
    table_.keep(std::move(request));
  }
}

void Messenger::send_to_self(MessageRequestPtr request) {
  const MessageHeader header = request->header;
  const uint64_t credit = credit_of(header.num_bytes);
  if (header.num_bytes <= kEagerBytes && credit <= credit_to_self_) {
    if (!on_message(header, request->data)) credit_to_self_ -= credit;
    on_end(*request, Status(), header);
    return;
  }
  Arrival arrival;
  arrival.header = header;
  arrival.send = std::move(request);
  MessageRequestPtr receive = table_.take_receive(header);
  if (receive != nullptr) {
    deliver(std::move(arrival), std::move(receive));
  } else {
    table_.keep(std::move(arrival));
  }
}

// The message matches the receive by source, tag and context. If size or dtype differ, the receive fails.
void Messenger::deliver(Arrival arrival, MessageRequestPtr receive) {
  const MessageHeader& message = arrival.header;
  Status status = compare(receive->header, message);
  PeerLink* link = links_[static_cast<size_t>(message.source)].get();
  if (arrival.send != nullptr) {
    if (status.ok()) copy_payload(message, arrival.send->data, receive->data);
    on_end(*arrival.send, Status(), message);
  } else if (arrival.has_payload) {
    if (status.ok()) copy_payload(message, arrival.payload.data(), receive->data);
    if (link == nullptr) credit_to_self_ += credit_of(message.num_bytes);
    if (link != nullptr) link->give_credit(message.num_bytes);
  } else if (status.ok()) {
    link->request(arrival.announcement, message, std::move(receive));
    return;
  } else {
    link->decline(arrival.announcement.id, MessageFrame::Kind::kDone);
  }
  on_end(*receive, std::move(status), message);
}

bool Messenger::on_message(const MessageHeader& message, const char* payload) {
  if (contexts_.is_removed(message.context)) return true;
  const MessageRequestPtr receive = table_.take_receive(message);
  if (receive == nullptr) {
    Arrival arrival;
    arrival.header = message;
    arrival.has_payload = true;
    arrival.payload.assign(payload, payload + message.num_bytes);
    table_.keep(std::move(arrival));
    return false;
  }
  Status status = compare(receive->header, message);
  if (status.ok()) copy_payload(message, payload, receive->data);
  on_end(*receive, std::move(status), message);
  return true;
}

void Messenger::on_announcement(const MessageHeader& message, const Announcement& announcement) {
  if (contexts_.is_removed(message.context)) {
    links_[static_cast<size_t>(message.source)]->decline(announcement.id, MessageFrame::Kind::kRemoved);
    return;
  }
  Arrival arrival;
  arrival.header = message;
  arrival.announcement = announcement;
  MessageRequestPtr receive = table_.take_receive(message);
  if (receive != nullptr) {
    deliver(std::move(arrival), std::move(receive));
  } else {
    table_.keep(std::move(arrival));
  }
}

void Messenger::on_end(const MessageRequest& request, Status status, const MessageHeader& message) {
  --num_pending_;
  options_.handles->complete(request.handle, std::move(status), {}, nullptr,
                             {message.source, static_cast<int64_t>(message.num_bytes)});
}

Status Messenger::move(bool* progressed) {
  try {
    if (!queue_.empty()) {
      *progressed = true;
      // Credit may have come: without it a small message is announced, and then waits for its receive.
      if (!has_ended() && local_links_.can_progress()) {
        const Status status = local_links_.progress(progressed);
        if (!status.ok()) return status;
      }
      local_links_.set_active();
      queue_.take(&new_requests_);
      for (MessageRequestPtr& request : new_requests_) begin(std::move(request));
      new_requests_.clear();
    }
    if (has_ended()) return Status();
    const Status status = local_links_.can_progress() ? local_links_.progress(progressed) : Status();
    return status.ok() && remote_links_ != nullptr ? remote_links_->progress(progressed) : status;
  } catch (const std::exception& error) {
    return Status(HVL_JOB_BROKEN, "the messages of rank " + std::to_string(options_.rank) + " failed: " + error.what());
  }
}

Status Messenger::check() {
  if (has_ended() || remote_links_ == nullptr) return Status();
  const uint64_t now = now_ns();
  for (const RemoteLinks::Lost& lost : remote_links_->lost()) {
    // Most often the job has ended, or another rank reports why it is broken.
    const bool is_needed = lost.link->has_requests() || table_.awaits(lost.link->rank());
    if (is_needed && now - lost.since > kTimeToSayWhy) return lost.status;
  }
  for (const auto& link : links_) {
    if (link == nullptr || link->is_lost() || !link->has_requests()) continue;
    const Status status = link->stream().check_answered();
    if (!status.ok()) return status;
  }
  return Status();
}

void Messenger::remove_process_set(int32_t id) {
  local_links_.set_active();  // answers to messages that have arrived must be sent
  std::vector<MessageRequestPtr> receives;
  std::vector<Arrival> arrivals;
  table_.take_context(contexts_.remove(id), &receives, &arrivals);
  const Status removed(HVL_INVALID_ARGUMENT, "process set " + std::to_string(id) + " of a message has been removed");
  for (const MessageRequestPtr& receive : receives) on_end(*receive, removed, receive->header);
  for (const Arrival& arrival : arrivals) {
    PeerLink* link = links_[static_cast<size_t>(arrival.header.source)].get();
    if (arrival.send != nullptr) {
      on_end(*arrival.send, removed, arrival.header);
    } else if (!arrival.has_payload) {
      link->decline(arrival.announcement.id, MessageFrame::Kind::kRemoved);
    } else if (link != nullptr) {
      link->give_credit(arrival.header.num_bytes);
    } else {
      credit_to_self_ += credit_of(arrival.header.num_bytes);
    }
  }
}

void Messenger::finish() {
  if (remote_links_ == nullptr || std::exchange(is_finishing_, true)) return;
  local_links_.set_active();
  for (const auto& link : links_) {
    if (link != nullptr && !link->is_lost()) link->finish();
  }
}

void Messenger::tell_broken(const std::string& why) {
  if (remote_links_ != nullptr) remote_links_->tell_broken(why);
}

bool Messenger::is_finished() const {
  return remote_links_ == nullptr || std::all_of(links_.begin(), links_.end(), [](const auto& link) {
           return link == nullptr || link->is_finished();
         });
}

void Messenger::end(const Status& status) {
  why_it_ended_ = status;
  if (status.code() != HVL_SHUT_DOWN) queue_.close(status);
  has_ended_.store(true);
  std::vector<MessageRequestPtr> requests;
  table_.take_requests(&requests, status.code() == HVL_SHUT_DOWN);
  for (const auto& link : links_) {
    if (link != nullptr) link->take_all(&requests);
  }
  for (const MessageRequestPtr& request : requests) on_end(*request, status, request->header);
  const auto end_new_requests = [&] {
    for (MessageRequestPtr& request : new_requests_) {
      if (request != nullptr) begin(std::move(request));
    }
    new_requests_.clear();
  };
  end_new_requests();  // those that an exception has left there
  queue_.take(&new_requests_);
  end_new_requests();
}

void Messenger::close_in_child() {
  for (const auto& link : links_) {
    if (link != nullptr) link->stream().close();
  }
}

}  // namespace hvl
