#include "parameters/client_session.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace hvl {

namespace {

// The limits of what is on its way to the server. It drops a client that sends more than it must keep.
constexpr size_t kMostLarge = 64;
constexpr uint64_t kMostBatchBytes = kMessageCredit / 2 - 8 * kEagerBytes;

}  // namespace

void Piece::set_number(uint64_t number) {
  command.number = number;
  command.num_inline = is_large() ? 0 : static_cast<uint32_t>(num_sent);
}

Status Piece::take(const Reply& reply, const std::string& server) {
  is_answered = true;
  view = reply.view;
  if (reply.status.ok()) return Status();
  const std::string text = server + ": " + reply.status.message();
  return reply.status.is_lost() ? Status::lost(text) : Status(reply.status.code(), text);
}

void Piece::end(const Status& status, const OnEnd& on_end_of_session) {
  if (on_end == nullptr) return on_end_of_session(this, status);
  const OnEnd function = std::move(on_end);
  function(this, status);
}

ClientSession::ClientSession(const std::string& server, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
                             Piece::OnEnd on_end)
    : Session(server, std::move(stream), keys), on_end_(std::move(on_end)) {}

void ClientSession::call(Piece* piece) {
  patience_ = std::max(patience_, piece->patience);
  if (!has_pending()) renew_patience();
  waiting_.push_back(piece);
}

void ClientSession::renew_patience() {
  if (patience_ > 0) last_news_ = now_ns();
}

Status ClientSession::check_patience(uint64_t now) {
  if (patience_ == 0 || !has_pending() || now < last_news_) return Status();
  const uint64_t silence = now - last_news_;
  if (silence > patience_) {
    return Status::lost(peer() + " has not answered for " + std::to_string(silence / kMillisecond) + " ms");
  }
  if (silence > patience_ / 4 && !is_asking_) {
    is_asking_ = true;
    question_ = Piece();
    question_.command.kind = Command::Kind::kAsk;
    question_.on_end = [this](Piece*, const Status&) { is_asking_ = false; };
    waiting_.push_front(&question_);
  }
  return Status();
}

// Each command may be a batch by itself.
uint64_t ClientSession::cost_of(const Piece& piece) {
  return credit_of(kMostCommandBytes) + (piece.is_large() ? 0 : piece.num_sent);
}

bool ClientSession::has_room_for(const Piece& piece) const {
  return num_batch_bytes_ + cost_of(piece) <= kMostBatchBytes && (!piece.is_large() || num_large_ < kMostLarge);
}

// The commands come first, so that the server can carry out the first one when it has its elements.
Status ClientSession::before_sending() {
  std::vector<const Piece*> large;
  while (can_call()) {
    Piece* piece = waiting_.front();
    Command& command = piece->command;
    piece->set_number(next_number_++);
    command.address = stream().can_copy() ? reinterpret_cast<uintptr_t>(piece->received) : 0;
    pending_[command.number] = piece;
    waiting_.pop_front();  // after the insertion, which may throw
    num_batch_bytes_ += cost_of(*piece);
    put(command, piece->sent);
    if (!piece->is_large()) continue;
    ++num_large_;
    large.push_back(piece);
  }
  if (!large.empty()) flush();
  for (const Piece* piece : large) send_elements(piece->command.number, piece->sent, piece->num_sent);
  return Status();
}

void ClientSession::leave() {
  Command command;
  command.kind = Command::Kind::kLeave;
  command.number = next_number_++;
  put(command, nullptr);
}

Status ClientSession::on_batch(Bytes batch) {
  BatchReader reader(batch);
  Status status;
  while (status.ok() && !reader.is_at_end()) {
    Reply reply;
    status = reader.read(&reply);
    if (!status.ok()) break;
    const auto found = pending_.find(reply.number);
    const bool fits = found != pending_.end() && (found->second->command.kind != Command::Kind::kPull ||
                                                  found->second->command.address != 0 || !reply.status.ok());
    if (!fits) return wrong("a reply to no command");
    if (found->second->is_coming) return wrong("an error behind the elements");
    if (found->second->is_large() && !found->second->is_sent) return wrong("a reply before it has the elements");
    end(reply.number, found->second->take(reply, peer()));
  }
  give_credit(batch.size());
  return status;
}

Status ClientSession::on_elements(uint64_t number, uint64_t num_bytes) {
  const auto found = pending_.find(number);
  if (found == pending_.end() || found->second->command.kind != Command::Kind::kPull ||
      found->second->num_received != num_bytes || std::exchange(found->second->is_coming, true)) {
    return wrong("elements that were not asked for");
  }
  fetch(number, found->second->received);
  return Status();
}

Status ClientSession::on_fetched(uint64_t number) {
  const auto found = pending_.find(number);
  if (found != pending_.end()) found->second->is_answered = true;
  end(number, Status());
  return Status();
}

// The server's reply ends the push.
Status ClientSession::on_sent(uint64_t number) {
  const auto found = pending_.find(number);
  if (found != pending_.end()) found->second->is_sent = true;
  return Status();
}

void ClientSession::end(uint64_t number, const Status& status) {
  const auto found = pending_.find(number);
  if (found == pending_.end()) return;
  Piece* piece = found->second;
  pending_.erase(found);
  num_batch_bytes_ -= cost_of(*piece);
  if (piece->is_large()) --num_large_;
  piece->end(status, on_end_);
}

void ClientSession::fail(const Status& status) {
  for (const auto& [number, piece] : std::exchange(pending_, {})) piece->end(status, on_end_);
  for (Piece* piece : std::exchange(waiting_, {})) piece->end(status, on_end_);
}

}  // namespace hvl
