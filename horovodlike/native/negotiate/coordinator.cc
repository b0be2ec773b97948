#include "negotiate/coordinator.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "negotiate/agreement.h"
#include "negotiate/entry_table.h"

namespace hvl {
namespace {

struct ProcessSet {
  std::vector<int> members;  // ascending
  std::unordered_map<std::string, TensorId> names;
};

// Allreduces that are to be executed together; open until something has to come after it.
struct Batch {
  int32_t process_set = 0;
  Device device = HVL_CPU;
  int64_t bytes = 0;
  int32_t num_tensors = 0;
  std::vector<TensorId> ids;
};

Status protocol_error(int rank, const std::string& what) {
  return Status(HVL_JOB_BROKEN, "Protocol error: rank " + std::to_string(rank) + " " + what + ".");
}

Decision make_decision(Record::Type type, Reason::Why why, int32_t count, int64_t bytes) {
  Decision decision;
  decision.record.type = type;
  decision.reason = {why, count, bytes};
  return decision;
}

Decision make_execute(std::vector<TensorId> ids, int32_t num_tensors, int64_t bytes) {
  Decision decision = make_decision(Record::Type::kExecute, Reason::Why::kAllReady, num_tensors, bytes);
  decision.record.ids = std::move(ids);
  return decision;
}

Decision make_error(const Signature& request, const Status& status, int32_t num_ranks) {
  Decision decision = make_decision(Record::Type::kError, Reason::Why::kRefused, num_ranks, 0);
  decision.record.signature.name = request.name;
  decision.record.signature.process_set = request.process_set;
  decision.record.status = status.code();
  decision.record.text = status.message();
  return decision;
}

// What the defined entry stands for on one rank.
Signature signature_on(const Details& details, int rank, int size) {
  Signature signature = details.signature;
  for (size_t t = 0; t < signature.tensors.size() && !details.first_dims.empty(); ++t) {
    signature.tensors[t].shape[0] = details.first_dims[t * static_cast<size_t>(size) + static_cast<size_t>(rank)];
  }
  return signature;
}

std::string count_of(int32_t count, const char* noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

}  // namespace

std::string Reason::text() const {
  const std::string tensors =
      count == 0 ? "barrier" : count_of(count, "tensor") + ", " + std::to_string(bytes) + " bytes";
  switch (why) {
    case Why::kAllReady: return tensors + ", all ranks ready";
    case Why::kNew: return tensors + ", first use of the name";
    case Why::kChanged: return tensors + ", changed since the last use of the name";
    case Why::kRefused: return "not executed on " + count_of(count, "rank");
    case Why::kCacheFull: return "least recently used of " + count_of(count, "known tensor");
    case Why::kRankLeft: return "a rank has ended the job";
  }
  return "";
}

struct Coordinator::State {
  explicit State(const CoordinatorOptions& given);

  // The one place that knows who takes part. Null: no such process set.
  ProcessSet* find_process_set(int32_t process_set) { return process_set == 0 ? &all_ranks : nullptr; }

  Status on_request(int rank, const Signature& signature, uint64_t now);
  Status add_ready(TableEntry* entry, int rank, uint64_t now);
  Status stale_or_unknown(int rank, TensorId id);
  TableEntry* find_or_add(ProcessSet* set, const Signature& signature);
  void shut_down(int rank, const std::string& text);

  bool settle(TableEntry* entry, std::vector<Decision>* decisions);
  void define(TableEntry* entry, Verdict verdict, std::vector<Decision>* decisions);
  void remove(TableEntry* entry);
  void execute(TableEntry* entry, std::vector<Decision>* decisions);
  Batch* batch_for(const TableEntry& entry, std::vector<Decision>* decisions);
  size_t likely_batch(const TableEntry& first) const;
  void close_batches(std::vector<Decision>* decisions);
  void evict(std::vector<Decision>* decisions);

  CoordinatorOptions options;
  ProcessSet all_ranks;
  EntryTable table;
  std::vector<TensorId> completed;  // all members ready, not decided yet; in order of completion
  std::vector<Decision> refused;    // needs no other rank to be wrong
  std::vector<Batch> batches;       // open ones while deciding, at most one per process set and device
  size_t num_undecided = 0;         // of `completed`, while deciding
  uint64_t num_started = 0;
  uint64_t num_requests = 0;
  bool shutting_down = false;
  bool shutdown_decided = false;
  std::string shutdown_text;
};

Coordinator::State::State(const CoordinatorOptions& given) : options(given), table(std::max(1, given.size)) {
  options.size = std::max(1, given.size);
  options.fusion_threshold = std::max<int64_t>(0, given.fusion_threshold);
  options.cache_capacity = std::max(0, given.cache_capacity);
  options.max_batch = std::max(1, given.max_batch);
  all_ranks.members.resize(static_cast<size_t>(options.size));
  std::iota(all_ranks.members.begin(), all_ranks.members.end(), 0);
}

// ---- Messages -------------------------------------------------------------------------------------------------------

Status Coordinator::State::add_ready(TableEntry* entry, int rank, uint64_t now) {
  if (!table.add_ready(entry, rank)) {
    return protocol_error(rank,
                          "announced '" + table.details(*entry).signature.name + "' again before it was executed");
  }
  if (entry->num_ready == 1) {
    entry->since = now;
    entry->order = ++num_started;
  }
  if (entry->num_ready == entry->num_members) completed.push_back(entry->id);
  return Status();
}

// For an id that stands for nothing. A rank that has not read yet that it was evicted sends the request again when it
// does.
Status Coordinator::State::stale_or_unknown(int rank, TensorId id) {
  if (table.was_given(id) && table.find(id) == nullptr) return Status();
  return protocol_error(rank, "announced the unknown tensor id " + std::to_string(id));
}

TableEntry* Coordinator::State::find_or_add(ProcessSet* set, const Signature& signature) {
  const auto known = set->names.find(signature.name);
  if (known != set->names.end()) return table.find(known->second);
  TableEntry* entry = table.add();
  entry->num_members = static_cast<int32_t>(set->members.size());
  entry->process_set = signature.process_set;
  entry->kind = signature.kind;
  table.details(*entry).signature = signature;
  set->names.emplace(signature.name, entry->id);
  return entry;
}

Status Coordinator::State::on_request(int rank, const Signature& signature, uint64_t now) {
  ++num_requests;
  ProcessSet* set = find_process_set(signature.process_set);
  if (set == nullptr) {
    const std::string text = "There is no process set " + std::to_string(signature.process_set) + ", which rank " +
                             std::to_string(rank) + " wants for '" + signature.name + "'.";
    refused.push_back(make_error(signature, Status(HVL_INVALID_ARGUMENT, text), 1));
    return Status();
  }
  TableEntry* entry = find_or_add(set, signature);
  Status status = add_ready(entry, rank, now);
  if (!status.ok()) return status;
  entry->requested = true;
  add_to_proposals(rank, signature, &table.details(*entry).proposals);
  return status;
}

void Coordinator::State::shut_down(int rank, const std::string& text) {
  shutting_down = true;
  shutdown_text = "rank " + std::to_string(rank) + " has shut the job down" + (text.empty() ? "" : ": " + text);
}

// ---- Decisions ------------------------------------------------------------------------------------------------------

// For an entry that some ranks requested in full: defines it, or decides the error and is false.
bool Coordinator::State::settle(TableEntry* entry, std::vector<Decision>* decisions) {
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
      if (has_requested[static_cast<size_t>(rank)]) continue;
      add_to_proposals(rank, signature_on(details, rank, options.size), &proposals);
    }
  }
  Verdict verdict = agree(std::move(proposals), options.size);
  if (verdict.status.ok()) {
    define(entry, std::move(verdict), decisions);
    return true;
  }
  close_batches(decisions);  // what was complete before comes before
  decisions->push_back(make_error(details.signature, verdict.status, entry->num_members));
  table.clear_ready(entry);
  if (!entry->defined) remove(entry);
  return false;
}

void Coordinator::State::define(TableEntry* entry, Verdict verdict, std::vector<Decision>* decisions) {
  Details& details = table.details(*entry);
  if (entry->defined && verdict.signature == details.signature && verdict.first_dims == details.first_dims) return;
  const Reason::Why why = entry->defined ? Reason::Why::kChanged : Reason::Why::kNew;
  entry->defined = true;
  entry->kind = verdict.signature.kind;
  entry->device = verdict.signature.device;
  entry->num_tensors = static_cast<int32_t>(verdict.signature.tensors.size());
  entry->num_bytes = verdict.signature.num_bytes();
  details.signature = std::move(verdict.signature);
  details.first_dims = std::move(verdict.first_dims);

  Decision decision = make_decision(Record::Type::kDefine, why, entry->num_tensors, entry->num_bytes);
  decision.record.id = entry->id;
  decision.record.signature = details.signature;
  decision.record.first_dims = details.first_dims;
  decisions->push_back(std::move(decision));
}

void Coordinator::State::remove(TableEntry* entry) {
  find_process_set(entry->process_set)->names.erase(table.details(*entry).signature.name);
  table.remove(entry);
}

// The batch that has room for the entry.
Batch* Coordinator::State::batch_for(const TableEntry& entry, std::vector<Decision>* decisions) {
  const auto fits_kind = [&](const Batch& batch) {
    return batch.process_set == entry.process_set && batch.device == entry.device;
  };
  auto batch = std::find_if(batches.begin(), batches.end(), fits_kind);
  if (batch == batches.end()) {
    batch = batches.insert(batch, {entry.process_set, entry.device, 0, 0, {}});
  } else if (options.fusion_threshold == 0 || entry.num_bytes > options.fusion_threshold - batch->bytes ||
             static_cast<int64_t>(batch->ids.size()) >= options.max_batch) {
    decisions->push_back(make_execute(std::move(batch->ids), batch->num_tensors, batch->bytes));
    *batch = {entry.process_set, entry.device, 0, 0, {}};
  }
  return &*batch;
}

// How many ids to make room for at once: as many as are left, if all are as large as the first.
size_t Coordinator::State::likely_batch(const TableEntry& first) const {
  const size_t by_bytes = static_cast<size_t>(options.fusion_threshold / std::max<int64_t>(1, first.num_bytes));
  return std::min({num_undecided, std::max<size_t>(1, by_bytes), static_cast<size_t>(options.max_batch)});
}

void Coordinator::State::execute(TableEntry* entry, std::vector<Decision>* decisions) {
  table.clear_ready(entry);
  table.touch(entry);
  if (entry->kind != HVL_ALLREDUCE) {
    close_batches(decisions);
    decisions->push_back(make_execute({entry->id}, entry->num_tensors, entry->num_bytes));
    return;
  }
  Batch* batch = batch_for(*entry, decisions);
  if (batch->ids.empty()) batch->ids.reserve(likely_batch(*entry));
  batch->ids.push_back(entry->id);
  batch->bytes += entry->num_bytes;
  batch->num_tensors += entry->num_tensors;
}

void Coordinator::State::close_batches(std::vector<Decision>* decisions) {
  for (Batch& batch : batches) {
    decisions->push_back(make_execute(std::move(batch.ids), batch.num_tensors, batch.bytes));
  }
  batches.clear();
}

void Coordinator::State::evict(std::vector<Decision>* decisions) {
  const size_t num_defined = table.num_defined();
  const size_t capacity = static_cast<size_t>(options.cache_capacity);
  if (num_defined <= capacity) return;
  std::vector<TensorId> ids;
  for (TableEntry* entry = table.least_recent(); entry != nullptr && num_defined - ids.size() > capacity;) {
    TableEntry* next = table.more_recent(*entry);
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

Status Coordinator::on_ready(int rank, TensorId id, uint64_t now) {
  if (state_->shutting_down) return Status();
  if (rank < 0 || rank >= state_->options.size) return protocol_error(rank, "does not exist");
  TableEntry* entry = state_->table.find(id);
  if (entry == nullptr || !entry->defined) return state_->stale_or_unknown(rank, id);
  return state_->add_ready(entry, rank, now);
}

Status Coordinator::on_message(int rank, const Message& message, uint64_t now) {
  if (state_->shutting_down) return Status();
  if (rank < 0 || rank >= state_->options.size) return protocol_error(rank, "does not exist");
  switch (message.type) {
    case Message::Type::kReady:
      for (TensorId id : message.ids) {
        Status status = on_ready(rank, id, now);
        if (!status.ok()) return status;
      }
      return Status();
    case Message::Type::kRequest: return state_->on_request(rank, message.signature, now);
    case Message::Type::kShutdown: state_->shut_down(rank, message.text); return Status();
  }
  return protocol_error(rank, "sent a message of unknown type");
}

void Coordinator::decide(std::vector<Decision>* decisions) {
  State& state = *state_;
  for (Decision& decision : state.refused) decisions->push_back(std::move(decision));
  state.refused.clear();
  state.num_undecided = state.completed.size();
  for (TensorId id : state.completed) {
    TableEntry* entry = state.table.find(id);
    if (!entry->requested || state.settle(entry, decisions)) state.execute(entry, decisions);
    --state.num_undecided;
  }
  state.completed.clear();
  state.close_batches(decisions);
  state.evict(decisions);
  if (!state.shutting_down || state.shutdown_decided) return;
  state.shutdown_decided = true;
  Decision decision = make_decision(Record::Type::kShutdown, Reason::Why::kRankLeft, 1, 0);
  decision.record.status = HVL_SHUT_DOWN;
  decision.record.text = state.shutdown_text;
  decisions->push_back(std::move(decision));
}

std::vector<Pending> Coordinator::pending() const {
  std::vector<std::pair<uint64_t, const TableEntry*>> waiting;
  state_->table.for_each([&](const TableEntry& entry) {
    if (entry.num_ready > 0 && entry.num_ready < entry.num_members) waiting.emplace_back(entry.order, &entry);
  });
  std::sort(waiting.begin(), waiting.end());
  std::vector<Pending> result;
  for (const auto& [order, entry] : waiting) {
    Pending pending{state_->table.details(*entry).signature.name, entry->kind, {}, {}, entry->since};
    for (int rank : state_->find_process_set(entry->process_set)->members) {
      (state_->table.is_ready(*entry, rank) ? pending.ready : pending.missing).push_back(rank);
    }
    result.push_back(std::move(pending));
  }
  return result;
}

uint64_t Coordinator::negotiated_in_full() const { return state_->num_requests; }

}  // namespace hvl
