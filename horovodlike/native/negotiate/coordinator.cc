#include "negotiate/coordinator.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "negotiate/coordinator_state.h"
#include "negotiate/validate.h"

namespace hvl {
namespace {

Decision make_decision(Record::Type type, Reason::Why why, int32_t count, int64_t bytes) {
  Decision decision;
  decision.record.type = type;
  decision.reason = {why, count, bytes};
  return decision;
}

// The signature of a defined tensor on one rank, with that rank's varying values.
Signature signature_on(const Details& details, int rank) {
  Signature signature = details.signature;
  const size_t begin = static_cast<size_t>(rank) * details.varying_per_rank;
  put_varying(details.varying.data() + begin, details.varying_per_rank, &signature);
  return signature;
}

std::string count_of(int32_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace

Status not_a_member(int rank) {
  return protocol_error(rank, "announced a tensor of a process set of which it is no member");
}

Status not_a_member(int rank, const Signature& signature) {
  return protocol_error(rank, "sent '" + signature.name + "' for process set " + std::to_string(signature.process_set) +
                                  ", of which it is no member");
}

Decision make_error(const Signature& request, const Status& status, int32_t num_ranks) {
  Decision decision = make_decision(Record::Type::kError, Reason::Why::kRefused, num_ranks, 0);
  decision.record.signature.name = request.name;
  decision.record.signature.process_set = request.process_set;
  decision.record.status = status.code();
  decision.record.text = status.message();
  return decision;
}

std::string Reason::text() const {
  const std::string tensors =
      count == 0 ? "barrier" : count_of(count, "tensor") + ", " + std::to_string(bytes) + " bytes";
  switch (why) {
    case Why::kAllReady: return tensors + ", all ranks ready";
    case Why::kNew: return tensors + ", first use of the name";
    case Why::kChanged: return tensors + ", changed since the last use of the name";
    case Why::kRefused: return "not executed on " + count_of(count, "rank");
    case Why::kCacheFull: return "least recently used of " + count_of(count, "known tensor");
    case Why::kSetRemoved: return count_of(count, "tensor") + " of a process set that was removed";
    case Why::kRankLeft: return "a rank has ended the job";
  }
  return "";
}

Coordinator::State::State(const CoordinatorOptions& given) : options(given), table(std::max(1, given.size)) {
  options.size = std::max(1, given.size);
  options.fusion_threshold = std::max<int64_t>(0, given.fusion_threshold);
  options.cache_capacity = std::max(0, given.cache_capacity);
  options.max_batch = std::max(1, given.max_batch);
  std::vector<int> all_ranks(static_cast<size_t>(options.size));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  add_process_set(std::move(all_ranks), false);
  num_joins.resize(static_cast<size_t>(options.size));
  straggler_stats.resize(static_cast<size_t>(options.size));
}

// ---- Messages -------------------------------------------------------------------------------------------------------

// `kind`: the kind of the rank's request, which may differ from the kind of the tensor.
Status Coordinator::State::add_ready(TensorState* tensor, int rank, Kind kind, uint64_t sent) {
  if (!table.add_ready(tensor, rank)) return announced_again(*tensor, rank);
  note_ready(tensor, tensor->num_ready == 1, {sent, ReadyMark(sent, rank)});
  if (tensor->kind != HVL_JOIN && num_joins[static_cast<size_t>(rank)] > 0 && !is_by_members(*tensor) &&
      find_process_set(tensor->process_set)->has_joined(rank)) {
    ++tensor->num_needed;  // a rank that has joined takes part where another of its threads continues
  }
  if (kind == HVL_JOIN) on_join(*tensor, rank);
  if (tensor->num_ready >= tensor->num_needed) complete(tensor, kind == HVL_JOIN);
  return Status();
}

Status Coordinator::State::announced_again(const TensorState& tensor, int rank) {
  return protocol_error(rank, "announced '" + table.details(tensor).signature.name + "' again before it was executed");
}

void Coordinator::State::note_ready(TensorState* tensor, bool is_first, const Readiness& readiness) {
  tensor->since = is_first ? readiness.since : std::min(tensor->since, readiness.since);
  tensor->last = is_first ? readiness.last : std::max(tensor->last, readiness.last);
}

void Coordinator::State::complete(TensorState* tensor, bool joins) {
  completed.push_back(tensor->id);
  join_is_complete |= joins || tensor->kind == HVL_JOIN ||
                      (tensor->requested && find_process_set(tensor->process_set)->is_joined_by(*tensor));
  if (tensor->kind != HVL_JOIN)
    straggler_stats[static_cast<size_t>(tensor->last.rank())].add(tensor->since, tensor->last.time());
}

// Returns ok if the id was evicted: a rank that has not read that record yet sends the request in full when it does.
Status Coordinator::State::stale_or_unknown(int rank, TensorId id) {
  if (table.was_given(id) && table.find(id) == nullptr) return Status();
  return protocol_error(rank, "announced the unknown tensor id " + std::to_string(id));
}

Status Coordinator::State::on_ready(int rank, TensorId id, uint64_t sent) {
  before_more_of(rank);
  TensorState* tensor = table.find(id);
  if (tensor == nullptr || !tensor->defined) return stale_or_unknown(rank, id);
  if (tensor->process_set != 0 && !is_member(tensor->process_set, rank)) {
    return not_a_member(rank);
  }
  Status status = add_ready(tensor, rank, tensor->kind, sent);
  end_join();
  return status;
}

TensorState* Coordinator::State::find_or_add(ProcessSet* set, const Signature& signature) {
  const auto known = set->names.find(signature.name);
  if (known != set->names.end()) return table.find(known->second);
  TensorState* tensor = table.add();
  tensor->process_set = signature.process_set;
  tensor->kind = signature.kind;
  table.details(*tensor).signature = signature;
  make_idle(tensor);
  set->names.emplace(signature.name, tensor->id);
  return tensor;
}

Status Coordinator::State::on_request(int rank, const Signature& signature, uint64_t sent) {
  ++num_requests;
  before_more_of(rank);
  ProcessSet* set = find_process_set(signature.process_set);
  if (set == nullptr) {
    const std::string text = "There is no process set " + std::to_string(signature.process_set) + ", which rank " +
                             std::to_string(rank) + " wants for '" + signature.name + "'.";
    early.push_back(make_error(signature, Status(HVL_INVALID_ARGUMENT, text), 1));
    return Status();
  }
  if (!is_member(signature.process_set, rank)) return not_a_member(rank, signature);
  TensorState* tensor = find_or_add(set, signature);
  Status status = add_ready(tensor, rank, signature.kind, sent);
  if (!status.ok()) return status;
  tensor->requested = true;
  add_to_proposals(rank, signature, &table.details(*tensor).proposals);
  end_join();
  return status;
}

void Coordinator::State::shut_down(int rank, const std::string& text) {
  shutting_down = true;
  shutdown_text = "rank " + std::to_string(rank) + " has shut the job down" + (text.empty() ? "" : ": " + text);
}

// ---- Decisions ------------------------------------------------------------------------------------------------------

// Compares the requests for a tensor that some ranks requested in full. Null: they differ, and an error was decided.
TensorState* Coordinator::State::settle(TensorState* tensor, std::vector<Decision>* decisions) {
  Details& details = table.details(*tensor);
  std::vector<Proposal> proposals = std::move(details.proposals);
  details.proposals.clear();
  tensor->requested = false;
  if (tensor->defined) {
    std::vector<bool> has_requested(static_cast<size_t>(options.size));
    for (const Proposal& proposal : proposals) {
      for (int rank : proposal.ranks) has_requested[static_cast<size_t>(rank)] = true;
    }
    for (int rank : find_process_set(tensor->process_set)->members) {
      if (has_requested[static_cast<size_t>(rank)] || !table.is_ready(*tensor, rank)) continue;
      add_to_proposals(rank, signature_on(details, rank), &proposals);
    }
  }
  Verdict verdict = agree(std::move(proposals), find_process_set(tensor->process_set)->members, options.size);
  if (verdict.status.ok()) return define(tensor, std::move(verdict), decisions);
  refuse(tensor, verdict.status, decisions);
  return nullptr;
}

void Coordinator::State::refuse(TensorState* tensor, const Status& status, std::vector<Decision>* decisions) {
  close_batches(decisions);  // tensors that were complete earlier come first in the log
  decisions->push_back(make_error(table.details(*tensor).signature, status, tensor->num_ready));
  decisions->back().record.absent = absent_from(*tensor);
  forget_joins(*tensor);
  make_idle(tensor);
  if (!tensor->defined) remove(tensor);
}

// Resets a tensor: no rank has it ready, and all ranks that have not joined are needed; for a join, all ranks; for the
// addition of a process set by its members, these members.
void Coordinator::State::make_idle(TensorState* tensor) {
  table.clear_ready(tensor);
  if (is_by_members(*tensor)) {
    tensor->num_needed = static_cast<int32_t>(table.details(*tensor).signature.arguments.size());
    return;
  }
  const ProcessSet& set = *find_process_set(tensor->process_set);
  tensor->num_needed = tensor->kind == HVL_JOIN ? static_cast<int32_t>(set.members.size()) : set.num_active();
}

// A tensor that changes while ranks are absent is given another id: an absent rank may announce by the old id before it
// reads that the tensor has changed.
TensorState* Coordinator::State::define(TensorState* tensor, Verdict verdict, std::vector<Decision>* decisions) {
  const Details& known = table.details(*tensor);
  if (tensor->defined && verdict.signature == known.signature && verdict.varying == known.varying) return tensor;
  const Reason::Why why = tensor->defined ? Reason::Why::kChanged : Reason::Why::kNew;
  std::vector<int32_t> absent = absent_from(*tensor);
  const TensorId replaced = tensor->defined && !absent.empty() ? tensor->id : kNoId;
  if (replaced != kNoId) tensor = with_new_id(replaced);
  Details& details = table.details(*tensor);
  tensor->defined = true;
  tensor->kind = verdict.signature.kind;
  tensor->device = verdict.signature.device;
  tensor->fuses = tensor->kind == HVL_ALLREDUCE && verdict.signature.op != HVL_ADASUM;
  tensor->num_tensors = static_cast<int32_t>(verdict.signature.tensors.size());
  tensor->num_bytes = verdict.signature.num_bytes();
  tensor->transport = static_cast<uint8_t>(options.routes.find(verdict.signature));
  details.signature = std::move(verdict.signature);
  details.varying = std::move(verdict.varying);
  details.varying_per_rank = verdict.varying_per_rank;

  Decision decision = make_decision(Record::Type::kDefine, why, tensor->num_tensors, tensor->num_bytes);
  decision.record.id = tensor->id;
  decision.record.signature = details.signature;
  decision.record.varying = details.varying;
  decision.record.varying_per_rank = details.varying_per_rank;
  decision.record.replaces = replaced;
  if (replaced == kNoId) decision.concerned = concerned_by(tensor->process_set, absent);
  if (replaced != kNoId) decision.record.absent = std::move(absent);
  decisions->push_back(std::move(decision));
  table.touch(tensor);
  return tensor;
}

void Coordinator::State::remove(TensorState* tensor) {
  find_process_set(tensor->process_set)->names.erase(table.details(*tensor).signature.name);
  table.remove(tensor);
}

// Returns an open batch that has room for the tensor.
OpenBatch* Coordinator::State::batch_for(const TensorState& tensor, const std::vector<int32_t>& absent,
                                         std::vector<Decision>* decisions) {
  const auto fits_kind = [&](const OpenBatch& batch) {
    return batch.process_set == tensor.process_set && batch.device == tensor.device &&
           batch.transport == tensor.transport && batch.absent == absent;
  };
  auto batch = std::find_if(batches.begin(), batches.end(), fits_kind);
  if (batch == batches.end()) {
    batch = batches.insert(batch, {tensor.process_set, tensor.device, absent, 0, 0, {}, tensor.transport});
  } else if (options.fusion_threshold == 0 || tensor.num_bytes > options.fusion_threshold - batch->bytes ||
             static_cast<int64_t>(batch->ids.size()) >= options.max_batch) {
    decisions->push_back(make_execute(std::move(*batch)));
    *batch = {tensor.process_set, tensor.device, absent, 0, 0, {}, tensor.transport};
  }
  return &*batch;
}

// Returns the number of ids for which to reserve memory: as many as the batch takes if all are as large as the first.
size_t Coordinator::State::likely_batch(const TensorState& first) const {
  const size_t by_bytes = static_cast<size_t>(options.fusion_threshold / std::max<int64_t>(1, first.num_bytes));
  return std::min({num_undecided, std::max<size_t>(1, by_bytes), static_cast<size_t>(options.max_batch)});
}

void Coordinator::State::execute(TensorState* tensor, std::vector<Decision>* decisions) {
  const std::vector<int32_t> absent = absent_from(*tensor);
  const bool changes = changes_process_sets(tensor->kind);
  Status status = check_absent(*tensor, absent);
  if (status.ok() && changes) status = check_change(table.details(*tensor).signature);
  if (!status.ok()) return refuse(tensor, status, decisions);
  make_idle(tensor);
  table.touch(tensor);
  if (tensor->fuses) {
    OpenBatch* batch = batch_for(*tensor, absent, decisions);
    if (batch->ids.empty()) batch->ids.reserve(likely_batch(*tensor));
    batch->ids.push_back(tensor->id);
    batch->bytes += tensor->num_bytes;
    batch->num_tensors += tensor->num_tensors;
    return;
  }
  close_batches(decisions);
  const Signature change = changes ? table.details(*tensor).signature : Signature();
  const bool joins = tensor->kind == HVL_JOIN;
  if (joins) forget_joins(*tensor);
  if (change.kind == HVL_REMOVE_PROCESS_SET) remove_process_set(static_cast<int32_t>(change.arguments[0]), decisions);
  decisions->push_back(make_execute({tensor->process_set,
                                     tensor->device,
                                     absent,
                                     tensor->num_bytes,
                                     tensor->num_tensors,
                                     {tensor->id},
                                     tensor->transport}));
  if (joins) decisions->back().record.last_joined = find_process_set(tensor->process_set)->last_joined;
  if (change.kind == HVL_ADD_PROCESS_SET) {
    add_process_set({change.arguments.begin(), change.arguments.end()}, change.is_by_members());
  }
}

Decision Coordinator::State::make_execute(OpenBatch batch) {
  Decision decision = make_decision(Record::Type::kExecute, Reason::Why::kAllReady, batch.num_tensors, batch.bytes);
  decision.concerned = concerned_by(batch.process_set, batch.absent);
  decision.record.ids = std::move(batch.ids);
  decision.record.absent = std::move(batch.absent);
  return decision;
}

void Coordinator::State::close_batches(std::vector<Decision>* decisions) {
  for (OpenBatch& batch : batches) {
    decisions->push_back(make_execute(std::move(batch)));
  }
  batches.clear();
}

void Coordinator::State::evict(std::vector<Decision>* decisions) {
  const size_t num_defined = table.num_defined();
  const size_t capacity = static_cast<size_t>(options.cache_capacity);
  if (num_defined <= capacity) return;
  std::vector<TensorId> ids;
  for (TensorState* tensor = table.least_recent(); tensor != nullptr && num_defined - ids.size() > capacity;) {
    TensorState* next = table.more_recent(*tensor);
    if (tensor->num_ready == 0) {
      ids.push_back(tensor->id);
      remove(tensor);
    }
    tensor = next;
  }
  if (ids.empty()) return;
  Decision decision =
      make_decision(Record::Type::kEvict, Reason::Why::kCacheFull, static_cast<int32_t>(num_defined), 0);
  decision.record.ids = std::move(ids);
  decisions->push_back(std::move(decision));
}

// ---- The class ------------------------------------------------------------------------------------------------------

Coordinator::Coordinator(const CoordinatorOptions& options) : state_(std::make_unique<State>(options)) {}
Coordinator::~Coordinator() = default;

Status Coordinator::on_ready(int rank, TensorId id, uint64_t sent) {
  if (state_->shutting_down) return Status();
  if (rank < 0 || rank >= state_->options.size) return protocol_error(rank, "does not exist");
  return state_->on_ready(rank, id, sent);
}

Status Coordinator::on_message(int rank, const Message& message, uint64_t sent) {
  if (state_->shutting_down) return Status();
  if (rank < 0 || rank >= state_->options.size) return protocol_error(rank, "does not exist");
  switch (message.type) {
    case Message::Type::kReady:
      for (TensorId id : message.ids) {
        Status status = state_->on_ready(rank, id, sent);
        if (!status.ok()) return status;
      }
      return Status();
    case Message::Type::kRequest: return state_->on_request(rank, message.signature, sent);
    case Message::Type::kShutdown: state_->shut_down(rank, message.text); return Status();
  }
  return protocol_error(rank, "sent a message of unknown type");
}

void Coordinator::State::decide_completed(std::vector<Decision>* decisions) {
  num_undecided = completed.size();
  for (TensorId id : completed) {
    TensorState* tensor = table.find(id);
    if (tensor == nullptr) continue;  // its process set was removed
    if (tensor->requested) tensor = settle(tensor, decisions);
    if (tensor != nullptr) execute(tensor, decisions);
    --num_undecided;
  }
  completed.clear();
  close_batches(decisions);
}

void Coordinator::decide(std::vector<Decision>* decisions) {
  State& state = *state_;
  for (Decision& decision : state.early) decisions->push_back(std::move(decision));
  state.early.clear();
  state.decide_completed(decisions);
  state.evict(decisions);
  if (!state.shutting_down || state.shutdown_decided) return;
  state.shutdown_decided = true;
  Decision decision = make_decision(Record::Type::kShutdown, Reason::Why::kRankLeft, 1, 0);
  decision.record.status = HVL_SHUT_DOWN;
  decision.record.text = state.shutdown_text;
  decisions->push_back(std::move(decision));
}

void Coordinator::set_fusion_threshold(int64_t num_bytes) { state_->options.fusion_threshold = num_bytes; }

std::vector<Pending> Coordinator::pending(uint64_t latest) const {
  std::vector<std::pair<uint64_t, TensorId>> waiting;
  state_->table.for_each([&](const TensorState& tensor) {
    // Ranks that join early wait until the others have no more data, which may take long and is no stall.
    if (tensor.num_ready == 0 || tensor.num_ready >= tensor.num_needed || tensor.since > latest) return;
    if (!state_->only_joins(tensor)) waiting.emplace_back(tensor.since, tensor.id);
  });
  std::sort(waiting.begin(), waiting.end());
  std::vector<Pending> result;
  for (const auto& [since, id] : waiting) {
    const TensorState* tensor = state_->table.find(id);
    const ProcessSet& set = *state_->find_process_set(tensor->process_set);
    const std::string& name = state_->table.details(*tensor).signature.name;
    Pending pending{name, tensor->kind, {}, {}, since, tensor->process_set, set.members};
    for (int rank : set.members) {
      const bool is_ready = state_->table.is_ready(*tensor, rank);
      if (is_ready) pending.ready.push_back(rank);
      if (!is_ready && state_->waits_for(*tensor, set, rank)) pending.missing.push_back(rank);
    }
    result.push_back(std::move(pending));
  }
  return result;
}

const std::vector<StragglerStats>& Coordinator::straggler_stats() const { return state_->straggler_stats; }

uint64_t Coordinator::negotiated_in_full() const { return state_->num_requests; }

}  // namespace hvl
