#include "parameters/session.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hvl {

namespace {

constexpr size_t kMostKept =
    256;  // messages of a kind that have arrived; a Session sends fewer before it has an answer

MessageRequestPtr make_request(bool is_send, int64_t tag, char* data, uint64_t num_bytes, int64_t handle = 0) {
  auto request = std::make_unique<MessageRequest>();
  request->is_send = is_send;
  request->header.tag = tag;
  request->header.num_bytes = num_bytes;
  request->data = data;
  request->handle = handle;
  return request;
}

}  // namespace

Session::Session(const std::string& peer, std::unique_ptr<PeerStream> stream, const MessageKeys* keys)
    : peer_(peer), link_(0, peer, std::move(stream), keys, this) {}

Status Session::progress(bool* progressed) {
  Status status = before_sending();
  if (!status.ok()) return status;
  flush();
  status = link_.progress(progressed);
  const Status handled = status_.ok() ? handle() : status_;  // also data that came before an error
  return status.ok() ? handled : status;
}

void Session::close() {
  std::vector<MessageRequestPtr> requests;
  link_.take_all(&requests);
}

// Passes received data to the overrides, which may use the link.
Status Session::handle() {
  Status status;
  for (uint64_t number : std::exchange(sent_, {})) {
    if (status.ok()) status = on_sent(number);
  }
  for (uint64_t number : std::exchange(begun_, {})) {
    if (status.ok()) status = on_elements(number, elements_.at(number).header.num_bytes);
  }
  while (status.ok() && !batches_.empty() && batches_.front().is_here) {
    Bytes batch = std::move(batches_.front().bytes);
    batches_.pop_front();
    status = on_batch(std::move(batch));
  }
  for (uint64_t number : std::exchange(fetched_, {})) {
    if (status.ok()) status = on_fetched(number);
  }
  return status;
}

void Session::flush() {
  if (out_.empty()) return;
  Bytes& batch = sent_batches_[next_handle_] = std::exchange(out_, {});
  link_.send(make_request(true, kBatchTag, batch.data(), batch.size(), next_handle_++));
}

void Session::send_elements(uint64_t number, const char* elements, uint64_t num_bytes) {
  link_.send(make_request(true, static_cast<int64_t>(number), const_cast<char*>(elements), num_bytes));
}

void Session::fetch(uint64_t number, char* memory) {
  const Arrived arrived = std::move(elements_.extract(number).mapped());
  if (arrived.is_here) {
    std::copy(arrived.bytes.begin(), arrived.bytes.end(), memory);
    link_.give_credit(arrived.bytes.size());
    fetched_.push_back(number);
  } else {
    const MessageHeader& header = arrived.header;
    link_.request(arrived.announcement, header, make_request(false, header.tag, memory, header.num_bytes));
  }
}

bool Session::on_message(const MessageHeader& message, const char* payload) {
  keep(Arrived{message, {}, Bytes(payload, payload + message.num_bytes), true});
  return false;  // give_credit() and fetch() return the credit
}

void Session::on_announcement(const MessageHeader& message, const Announcement& announcement) {
  keep(Arrived{message, announcement, {}, false});
}

void Session::keep(Arrived arrived) {
  const MessageHeader header = arrived.header;
  if (header.tag != kBatchTag) {
    const auto number = static_cast<uint64_t>(header.tag);
    if (elements_.size() >= kMostKept) {
      status_ = wrong("more messages of elements than may wait");
      return;
    }
    const bool is_new = elements_.emplace(number, std::move(arrived)).second;
    if (!is_new) status_ = wrong("elements of one number twice");
    if (is_new) begun_.push_back(number);
    return;
  }
  if (header.num_bytes > kEagerBytes || batches_.size() >= kMostKept) {
    status_ = wrong(header.num_bytes > kEagerBytes ? "a batch that is too long" : "more batches than may wait");
    return;
  }
  batches_.push_back(std::move(arrived));
  Arrived& batch = batches_.back();
  if (batch.is_here) return;
  batch.bytes.resize(header.num_bytes);
  link_.request(batch.announcement, header, make_request(false, kBatchTag, batch.bytes.data(), header.num_bytes));
}

void Session::on_end(const MessageRequest& request, Status, const MessageHeader&) {
  const auto number = static_cast<uint64_t>(request.header.tag);
  if (request.header.tag != kBatchTag) {
    (request.is_send ? sent_ : fetched_).push_back(number);
  } else if (request.is_send) {
    sent_batches_.erase(request.handle);
  } else {
    const auto batch = std::find_if(batches_.begin(), batches_.end(),
                                    [&](const Arrived& each) { return each.bytes.data() == request.data; });
    batch->is_here = true;
  }
}

Status Session::wrong(const std::string& what) const {
  return Status(HVL_JOB_BROKEN, "Protocol error: " + peer_ + " has sent " + what);
}

}  // namespace hvl
