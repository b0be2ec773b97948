// The coordinator's handling of messages for several ranks. Such a message has the same effect as one message of each
// rank; for ranks that join or have joined it is processed like that, one after the other.

#include <algorithm>

#include "negotiate/coordinator_state.h"
#include "negotiate/validate.h"

namespace hvl {
namespace {

// Calls `hear` for each rank of the message. The rank that was ready last comes last: it may be the last to join.
template <typename F>
Status one_by_one(const Message& message, const Readiness& readiness, F hear) {
  Status status;
  size_t index = 0;
  size_t index_of_latest = 0;
  message.ranks.for_each([&](int rank) {
    if (rank == message.latest) index_of_latest = index;
    if (rank != message.latest && status.ok()) status = hear(rank, index, readiness.since);
    ++index;
  });
  return status.ok() ? hear(message.latest, index_of_latest, readiness.last.time()) : status;
}

// The signature that the `index`-th of the ranks requests.
Signature signature_of(const Message& request, size_t index) {
  Signature signature = request.signature;
  if (request.varying.empty()) return signature;
  const size_t per_rank = request.varying.size() / static_cast<size_t>(request.ranks.size());
  put_varying(request.varying.data() + index * per_rank, per_rank, &signature);
  return signature;
}

int lowest_without(RankSet ranks, const RankSet& others) {
  ranks.remove(others);
  return ranks.lowest();
}

}  // namespace

Status Coordinator::on_message(const Message& message, uint64_t came) {
  State& state = *state_;
  if (state.shutting_down) return Status();
  const RankSet& ranks = message.ranks;
  if (ranks.empty() || !ranks.contains(message.latest)) return protocol_error(message.latest, "speaks for no rank");
  if (ranks.highest() >= state.options.size) return protocol_error(ranks.highest(), "does not exist");
  const uint64_t last = came - std::min(message.age, came);
  const Readiness readiness = {last - std::min(message.spread, last), ReadyMark(last, message.latest)};
  switch (message.type) {
    case Message::Type::kReady:
      for (TensorId id : message.ids) {
        Status status = state.on_ready(message, id, readiness);
        if (!status.ok()) return status;
      }
      return Status();
    case Message::Type::kRequest: return state.on_request(message, readiness);
    case Message::Type::kShutdown: state.shut_down(message.latest, message.text); return Status();
  }
  return protocol_error(message.latest, "sent a message of unknown type");
}

bool Coordinator::State::any_has_joined(const RankSet& ranks) const {
  if (num_joined == 0) return false;
  bool any = false;
  ranks.for_each([&](int rank) { any |= num_joins[static_cast<size_t>(rank)] > 0; });
  return any;
}

Status Coordinator::State::on_ready(const Message& message, TensorId id, const Readiness& readiness) {
  const RankSet& ranks = message.ranks;
  TensorState* tensor = table.find(id);
  if (any_has_joined(ranks) || (tensor != nullptr && tensor->kind == HVL_JOIN)) {
    return one_by_one(message, readiness, [&](int rank, size_t, uint64_t when) { return on_ready(rank, id, when); });
  }
  if (tensor == nullptr || !tensor->defined) return stale_or_unknown(ranks.lowest(), id);
  if (tensor->process_set != 0) {
    const RankSet& members = find_process_set(tensor->process_set)->ranks;
    if (!members.contains(ranks)) return not_a_member(lowest_without(ranks, members));
  }
  Status status = add_ready(tensor, ranks, readiness);
  end_join();
  return status;
}

Status Coordinator::State::on_request(const Message& request, const Readiness& readiness) {
  const RankSet& ranks = request.ranks;
  const Signature& signature = request.signature;
  ProcessSet* set = find_process_set(signature.process_set);
  if (set == nullptr || signature.kind == HVL_JOIN || any_has_joined(ranks)) {
    return one_by_one(request, readiness, [&](int rank, size_t index, uint64_t when) {
      return on_request(rank, signature_of(request, index), when);
    });
  }
  if (!set->ranks.contains(ranks)) return not_a_member(lowest_without(ranks, set->ranks), signature);
  num_requests += static_cast<uint64_t>(ranks.size());
  TensorState* tensor = find_or_add(set, signature);
  Status status = add_ready(tensor, ranks, readiness);
  if (!status.ok()) return status;
  tensor->requested = true;
  add_to_proposals(request, &table.details(*tensor).proposals);
  end_join();
  return status;
}

// None of `ranks` has joined, so all are needed, and the tensor is complete with the last of them at the earliest.
Status Coordinator::State::add_ready(TensorState* tensor, const RankSet& ranks, const Readiness& readiness) {
  const int32_t again = table.add_ready(tensor, ranks);
  if (again >= 0) return announced_again(*tensor, again);
  note_ready(tensor, tensor->num_ready == ranks.size(), readiness);
  if (tensor->num_ready >= tensor->num_needed) complete(tensor, false);
  return Status();
}

}  // namespace hvl
