#include "negotiate/partial_tensor.h"

#include <utility>

namespace hvl {

bool PartialTensor::holds_any_of(const RankSet& ranks) const {
  if (is_empty()) return false;
  if (ready_.ranks.first_common(ranks) >= 0) return true;
  return std::any_of(requests_.begin(), requests_.end(),
                     [&](const Request& request) { return request.ranks.first_common(ranks) >= 0; });
}

RankSet PartialTensor::announcers() const {
  RankSet ranks = ready_.ranks;
  for (const Request& request : requests_) ranks.add(request.ranks);
  ranks.add(gone_by_id_);
  ranks.add(gone_in_full_);
  return ranks;
}

void PartialTensor::add_ready(const RankSet& ranks, const Times& times) {
  count(ranks);
  ready_.ranks.add(ranks);
  ready_.times.add(times);
}

// A rank that announces again has received an answer that has not reached this host yet.
void PartialTensor::count(const RankSet& ranks) {
  gone_by_id_.remove(ranks);
  gone_in_full_.remove(ranks);
  num_held_ += ranks.size();
}

void PartialTensor::add_request(const Message& message, const Times& times) {
  count(message.ranks);
  Message part;
  part.ranks = message.ranks;
  part.varying = message.varying;
  Signature signature = message.signature;
  const bool varies = allocates(signature.kind);
  if (varies && part.varying.empty()) {
    const std::vector<int64_t> same = take_varying(&signature);
    for (int32_t i = 0; i < part.ranks.size(); ++i) part.varying.insert(part.varying.end(), same.begin(), same.end());
  }
  const size_t num_varying = part.varying.size() / static_cast<size_t>(part.ranks.size());
  auto request = std::find_if(requests_.begin(), requests_.end(), [&](const Request& other) {
    return other.num_varying == num_varying && other.signature == signature;
  });
  if (request == requests_.end()) {
    request = requests_.insert(request, Request{std::move(signature), num_varying, {}, {}, {}});
  }
  request->ranks.add(part.ranks);
  request->times.add(times);
  if (varies) request->parts.push_back(std::move(part));
}

void PartialTensor::release(std::vector<Outgoing>* out) {
  if (!ready_.ranks.empty()) append_ready(id, ready_.ranks, ready_.times, out);
  gone_by_id_.add(ready_.ranks);
  for (Request& request : requests_) {
    gone_in_full_.add(request.ranks);
    out->push_back({message_of(&request), request.times});
  }
  drop();
}

void PartialTensor::answer(const RankSet& absent) {
  for (RankSet* ranks : {&gone_by_id_, &gone_in_full_, &joined}) ranks->keep(absent);
}

void PartialTensor::forget_id() {
  id = kNoId;
  num_held_ -= ready_.ranks.size();
  ready_ = Ready();
  gone_by_id_.clear();
}

void PartialTensor::drop() {
  ready_.ranks.clear();
  ready_.times = Times();
  requests_.clear();
  num_held_ = 0;
}

Message PartialTensor::message_of(Request* request) {
  Message message;
  message.type = Message::Type::kRequest;
  message.signature = std::move(request->signature);
  message.ranks = std::move(request->ranks);
  // Each rank, and the position of its values.
  std::vector<std::pair<int, const int64_t*>> rows;
  for (const Message& part : request->parts) {
    const int64_t* row = part.varying.data();
    part.ranks.for_each([&](int rank) {
      rows.emplace_back(rank, row);
      row += request->num_varying;
    });
  }
  if (rows.empty()) return message;
  std::sort(rows.begin(), rows.end());
  const auto same = [&](const auto& row) {
    return std::equal(row.second, row.second + request->num_varying, rows[0].second);
  };
  if (std::all_of(rows.begin(), rows.end(), same)) {
    put_varying(rows[0].second, request->num_varying, &message.signature);
    return message;
  }
  for (const auto& row : rows)
    message.varying.insert(message.varying.end(), row.second, row.second + request->num_varying);
  return message;
}

void append_ready(TensorId id, const RankSet& ranks, const Times& times, std::vector<Outgoing>* out) {
  if (!out->empty()) {
    Outgoing& last = out->back();
    if (last.message.type == Message::Type::kReady && last.times.latest == times.latest &&
        last.times.last == times.last && last.message.ranks == ranks) {
      last.message.ids.push_back(id);
      last.times.since = std::min(last.times.since, times.since);
      return;
    }
  }
  Outgoing outgoing;
  outgoing.message.ids = {id};
  outgoing.message.ranks = ranks;
  outgoing.times = times;
  out->push_back(std::move(outgoing));
}

}  // namespace hvl
