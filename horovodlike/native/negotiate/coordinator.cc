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

// The signature of the defined entry on one rank.
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
  add_process_set(std::move(all_ranks));
  num_joins.resize(static_cast<size_t>(options.size));
  straggler_stats.resize(static_cast<size_t>(options.size));
}

// ---- Messages -------------------------------------------------------------------------------------------------------

// `kind`: of the rank's request, which may differ from the kind of the entry.
Status Coordinator::State::add_ready(TensorState* entry, int rank, Kind kind, uint64_t sent) {
  if (!table.add_ready(entry, rank)) return announced_again(*entry, rank);
  note_ready(entry, entry->num_ready == 1, {sent, ReadyMark(sent, rank)});
  if (entry->kind != HVL_JOIN && num_joins[static_cast<size_t>(rank)] > 0 &&
      find_process_set(entry->process_set)->has_joined(rank)) {
    ++entry->num_needed;  // another thread of the rank continues: it takes part
  }
  if (kind == HVL_JOIN) on_join(*entry, rank);
  if (entry->num_ready >= entry->num_needed) complete(entry, kind == HVL_JOIN);
  return Status();
}

Status Coordinator::State::announced_again(const TensorState& entry, int rank) {
  return protocol_error(rank, "announced '" + table.details(entry).signature.name + "' again before it was executed");
}

void Coordinator::State::note_ready(TensorState* entry, bool is_first, const Readiness& readiness) {
  entry->since = is_first ? readiness.since : std::min(entry->since, readiness.since);
  entry->last = is_first ? readiness.last : std::max(entry->last, readiness.last);
}

void Coordinator::State::complete(TensorState* entry, bool joins) {
  completed.push_back(entry->id);
  join_is_complete |= joins || entry->kind == HVL_JOIN ||
                      (entry->requested && find_process_set(entry->process_set)->is_joined_by(*entry));
  if (entry->kind != HVL_JOIN)
    straggler_stats[static_cast<size_t>(entry->last.rank())].add(entry->since, entry->last.time());
}

// For an undefined id. A rank that has not read yet that it was evicted sends the request again when it does.
Status Coordinator::State::stale_or_unknown(int rank, TensorId id) {
  if (table.was_given(id) && table.find(id) == nullptr) return Status();
  return protocol_error(rank, "announced the unknown tensor id " + std::to_string(id));
}

Status Coordinator::State::on_ready(int rank, TensorId id, uint64_t sent) {
  before_more_of(rank);
  TensorState* entry = table.find(id);
  if (entry == nullptr || !entry->defined) return stale_or_unknown(rank, id);
  if (entry->process_set != 0 && !is_member(entry->process_set, rank)) {
    return not_a_member(rank);
  }
  Status status = add_ready(entry, rank, entry->kind, sent);
  end_join();
  return status;
}

TensorState* Coordinator::State::find_or_add(ProcessSet* set, const Signature& signature) {
  const auto known = set->names.find(signature.name);
  if (known != set->names.end()) return table.find(known->second);
  TensorState* entry = table.add();
  entry->process_set = signature.process_set;
  entry->kind = signature.kind;
  make_idle(entry);
  table.details(*entry).signature = signature;
  set->names.emplace(signature.name, entry->id);
  return entry;
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
  TensorState* entry = find_or_add(set, signature);
  Status status = add_ready(entry, rank, signature.kind, sent);
  if (!status.ok()) return status;
  entry->requested = true;
  add_to_proposals(rank, signature, &table.details(*entry).proposals);
  end_join();
  return status;
}

void Coordinator::State::shut_down(int rank, const std::string& text) {
  shutting_down = true;
  shutdown_text = "rank " + std::to_string(rank) + " has shut the job down" + (text.empty() ? "" : ": " + text);
}

// ---- Decisions ------------------------------------------------------------------------------------------------------

// For an entry that some ranks requested in full: returns it as it is defined now, or null if an error was decided.
TensorState* Coordinator::State::settle(TensorState* entry, std::vector<Decision>* decisions) {
  Details& details = table.details(*entry);
  std::vector<Proposal> proposals = std::move(details.proposals);
  details.proposals.clear();
  entry->requested = false;
  if (entry->defined) {
    std::vector<bool> has_requested(static_cast<size_t>(options.size));
    for (const Proposal& proposal : proposals) {
      for (int rank : proposal.ranks) has_requested[static_cast<size_t>(rank)] = true;
    }
    for (int rank : find_process_set(entry->process_set)->members) {
      if (has_requested[static_cast<size_t>(rank)] || !table.is_ready(*entry, rank)) continue;
      add_to_proposals(rank, signature_on(details, rank), &proposals);
    }
  }
  Verdict verdict = agree(std::move(proposals), find_process_set(entry->process_set)->members, options.size);
  if (verdict.status.ok()) return define(entry, std::move(verdict), decisions);
  refuse(entry, verdict.status, decisions);
  return nullptr;
}

void Coordinator::State::refuse(TensorState* entry, const Status& status, std::vector<Decision>* decisions) {
  close_batches(decisions);  // what was complete earlier comes first
  decisions->push_back(make_error(table.details(*entry).signature, status, entry->num_ready));
  decisions->back().record.absent = absent_from(*entry);
  forget_joins(*entry);
  make_idle(entry);
  if (!entry->defined) remove(entry);
}

// No rank has it ready, and all that have not joined will be needed; for a join, all.
void Coordinator::State::make_idle(TensorState* entry) {
  table.clear_ready(entry);
  const ProcessSet& set = *find_process_set(entry->process_set);
  entry->num_needed = entry->kind == HVL_JOIN ? static_cast<int32_t>(set.members.size()) : set.num_active();
}

// An absent rank may announce by an id before it reads that the id has changed, so a tensor that changes then gets
// another id.
TensorState* Coordinator::State::define(TensorState* entry, Verdict verdict, std::vector<Decision>* decisions) {
  const Details& known = table.details(*entry);
  if (entry->defined && verdict.signature == known.signature && verdict.varying == known.varying) return entry;
  const Reason::Why why = entry->defined ? Reason::Why::kChanged : Reason::Why::kNew;
  std::vector<int32_t> absent = absent_from(*entry);
  const TensorId replaced = entry->defined && !absent.empty() ? entry->id : kNoId;
  if (replaced != kNoId) entry = with_new_id(replaced);
  Details& details = table.details(*entry);
  entry->defined = true;
  entry->kind = verdict.signature.kind;
  entry->device = verdict.signature.device;
  entry->fuses = entry->kind == HVL_ALLREDUCE && verdict.signature.op != HVL_ADASUM;
  entry->num_tensors = static_cast<int32_t>(verdict.signature.tensors.size());
  entry->num_bytes = verdict.signature.num_bytes();
  details.signature = std::move(verdict.signature);
  details.varying = std::move(verdict.varying);
  details.varying_per_rank = verdict.varying_per_rank;

  Decision decision = make_decision(Record::Type::kDefine, why, entry->num_tensors, entry->num_bytes);
  decision.record.id = entry->id;
  decision.record.signature = details.signature;
  decision.record.varying = details.varying;
  decision.record.varying_per_rank = details.varying_per_rank;
  decision.record.replaces = replaced;
  if (replaced == kNoId) decision.concerned = concerned_by(entry->process_set, absent);
  if (replaced != kNoId) decision.record.absent = std::move(absent);
  decisions->push_back(std::move(decision));
  table.touch(entry);
  return entry;
}

void Coordinator::State::remove(TensorState* entry) {
  find_process_set(entry->process_set)->names.erase(table.details(*entry).signature.name);
  table.remove(entry);
}

// Returns the batch that has room for the entry.
OpenBatch* Coordinator::State::batch_for(const TensorState& entry, const std::vector<int32_t>& absent,
                                         std::vector<Decision>* decisions) {
  const auto fits_kind = [&](const OpenBatch& batch) {
    return batch.process_set == entry.process_set && batch.device == entry.device && batch.absent == absent;
  };
  auto batch = std::find_if(batches.begin(), batches.end(), fits_kind);
  if (batch == batches.end()) {
    batch = batches.insert(batch, {entry.process_set, entry.device, absent, 0, 0, {}});
  } else if (options.fusion_threshold == 0 || entry.num_bytes > options.fusion_threshold - batch->bytes ||
             static_cast<int64_t>(batch->ids.size()) >= options.max_batch) {
    decisions->push_back(make_execute(std::move(*batch)));
    *batch = {entry.process_set, entry.device, absent, 0, 0, {}};
  }
  return &*batch;
}

// Returns the number of ids to reserve at once: the number left, if all are as large as the first.
size_t Coordinator::State::likely_batch(const TensorState& first) const {
  const size_t by_bytes = static_cast<size_t>(options.fusion_threshold / std::max<int64_t>(1, first.num_bytes));
  return std::min({num_undecided, std::max<size_t>(1, by_bytes), static_cast<size_t>(options.max_batch)});
}

void Coordinator::State::execute(TensorState* entry, std::vector<Decision>* decisions) {
  const std::vector<int32_t> absent = absent_from(*entry);
  const bool changes = changes_process_sets(entry->kind);
  Status status = check_absent(*entry, absent);
  if (status.ok() && changes) status = check_change(table.details(*entry).signature);
  if (!status.ok()) return refuse(entry, status, decisions);
  make_idle(entry);
  table.touch(entry);
  if (entry->fuses) {
    OpenBatch* batch = batch_for(*entry, absent, decisions);
    if (batch->ids.empty()) batch->ids.reserve(likely_batch(*entry));
    batch->ids.push_back(entry->id);
    batch->bytes += entry->num_bytes;
    batch->num_tensors += entry->num_tensors;
    return;
  }
  close_batches(decisions);
  const Signature change = changes ? table.details(*entry).signature : Signature();
  const bool joins = entry->kind == HVL_JOIN;
  if (joins) forget_joins(*entry);
  if (change.kind == HVL_REMOVE_PROCESS_SET) remove_process_set(static_cast<int32_t>(change.arguments[0]), decisions);
  decisions->push_back(
      make_execute({entry->process_set, entry->device, absent, entry->num_bytes, entry->num_tensors, {entry->id}}));
  if (joins) decisions->back().record.last_joined = find_process_set(entry->process_set)->last_joined;
  if (change.kind == HVL_ADD_PROCESS_SET) add_process_set({change.arguments.begin(), change.arguments.end()});
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
  for (TensorState* entry = table.least_recent(); entry != nullptr && num_defined - ids.size() > capacity;) {
    TensorState* next = table.more_recent(*entry);
    if (entry->num_ready == 0) {
      ids.push_back(entry->id);
      remove(entry);
    }
    entry = next;
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
    TensorState* entry = table.find(id);
    if (entry == nullptr) continue;  // its process set is gone
    if (entry->requested) entry = settle(entry, decisions);
    if (entry != nullptr) execute(entry, decisions);
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
  state_->table.for_each([&](const TensorState& entry) {
    // A rank that joins early waits for the others' data, which may take long.
    if (entry.num_ready == 0 || entry.num_ready >= entry.num_needed || entry.since > latest) return;
    if (!state_->only_joins(entry)) waiting.emplace_back(entry.since, entry.id);
  });
  std::sort(waiting.begin(), waiting.end());
  std::vector<Pending> result;
  for (const auto& [since, id] : waiting) {
    const TensorState* entry = state_->table.find(id);
    const ProcessSet& set = *state_->find_process_set(entry->process_set);
    const std::string& name = state_->table.details(*entry).signature.name;
    Pending pending{name, entry->kind, {}, {}, since, entry->process_set, set.members};
    for (int rank : set.members) {
      const bool is_ready = state_->table.is_ready(*entry, rank);
      if (is_ready) pending.ready.push_back(rank);
      if (!is_ready && !set.has_joined(rank)) pending.missing.push_back(rank);
    }
    result.push_back(std::move(pending));
  }
  return result;
}

const std::vector<StragglerStats>& Coordinator::straggler_stats() const { return state_->straggler_stats; }

uint64_t Coordinator::negotiated_in_full() const { return state_->num_requests; }

}  // namespace hvl
