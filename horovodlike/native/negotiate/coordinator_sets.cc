// The coordinator's knowledge of the participating ranks: process sets, and ranks that have joined.

#include <algorithm>
#include <iterator>
#include <utility>

#include "negotiate/coordinator_state.h"
#include "negotiate/rank_set.h"

namespace hvl {

// Checks a change on which the ranks agree: whether it is possible depends on the process sets that exist now.
Status Coordinator::State::check_change(const Signature& signature) {
  if (signature.kind == HVL_REMOVE_PROCESS_SET) {
    const int64_t id = signature.arguments[0];
    if (id != 0 && id <= INT32_MAX && find_process_set(static_cast<int32_t>(id)) != nullptr) return Status();
    return Status(HVL_INVALID_ARGUMENT, "There is no process set " + std::to_string(id) + " that could be removed.");
  }
  if (signature.is_by_members()) return Status();
  const std::vector<int> members(signature.arguments.begin(), signature.arguments.end());
  for (const auto& [id, set] : process_sets) {
    if (set.is_by_members || set.members != members) continue;
    return Status(HVL_INVALID_ARGUMENT,
                  "Process set " + std::to_string(id) + " has the same ranks already: " + text_of_ranks(members) + ".");
  }
  return Status();
}

bool Coordinator::State::is_by_members(const TensorState& tensor) const {
  return tensor.kind == HVL_ADD_PROCESS_SET && table.details(tensor).signature.is_by_members();
}

// Returns true if the tensor waits for a rank that does not have it ready.
bool Coordinator::State::waits_for(const TensorState& tensor, const ProcessSet& set, int rank) const {
  if (!is_by_members(tensor)) return !set.has_joined(rank);
  const std::vector<int64_t>& members = table.details(tensor).signature.arguments;
  return std::binary_search(members.begin(), members.end(), rank);
}

void Coordinator::State::add_process_set(std::vector<int> members, bool is_by_members) {
  ProcessSet set;
  set.is_by_members = is_by_members;
  set.members = std::move(members);
  set.ranks = RankSet(set.members);
  set.joined.resize(static_cast<size_t>(options.size));
  process_sets.emplace(next_process_set(process_sets), std::move(set));
}

// Removes a process set: requests on it fail, and its tensors are removed.
void Coordinator::State::remove_process_set(int32_t process_set, std::vector<Decision>* decisions) {
  Decision evicted;
  evicted.record.type = Record::Type::kEvict;
  evicted.reason = {Reason::Why::kSetRemoved, 0, 0};
  const auto names = std::move(find_process_set(process_set)->names);
  for (const auto& [name, id] : names) {
    TensorState* tensor = table.find(id);
    if (tensor->num_ready > 0) {
      Decision failed;
      failed.record.type = Record::Type::kError;
      failed.record.signature.name = name;
      failed.record.signature.process_set = process_set;
      failed.record.status = HVL_MISMATCH;  // others have removed it while this rank used it
      failed.record.text = "'" + name + "': process set " + std::to_string(process_set) + " has been removed.";
      failed.reason = {Reason::Why::kRefused, tensor->num_ready, 0};
      decisions->push_back(std::move(failed));
    }
    if (tensor->defined) evicted.record.ids.push_back(id);
    table.remove(tensor);
  }
  const ProcessSet& set = *find_process_set(process_set);
  for (int rank : set.members) num_joins[static_cast<size_t>(rank)] -= set.has_joined(rank) ? 1 : 0;
  num_joined -= set.num_joined;
  process_sets.erase(process_set);
  evicted.reason.count = static_cast<int32_t>(evicted.record.ids.size());
  if (!evicted.record.ids.empty()) decisions->push_back(std::move(evicted));
}

// Notes that a rank has joined: tensors for which only this rank was missing are complete.
void Coordinator::State::on_join(const TensorState& join, int rank) {
  ProcessSet& set = *find_process_set(join.process_set);
  if (set.has_joined(rank)) return;  // another thread of the rank has joined, under another name
  set.joined[static_cast<size_t>(rank)] = join.id;
  ++set.num_joined;
  set.last_joined = rank;
  ++num_joins[static_cast<size_t>(rank)];
  ++num_joined;
  std::vector<std::pair<uint64_t, TensorId>> complete;
  for (const auto& [name, id] : set.names) {
    TensorState* tensor = table.find(id);
    if (tensor->kind == HVL_JOIN || is_by_members(*tensor) || table.is_ready(*tensor, rank)) continue;
    const bool was_complete = tensor->num_ready == tensor->num_needed;
    --tensor->num_needed;
    if (!was_complete && tensor->num_ready > 0 && tensor->num_ready == tensor->num_needed) {
      complete.emplace_back(tensor->since, id);
    }
  }
  std::sort(complete.begin(), complete.end());
  for (const auto& [since, id] : complete) completed.push_back(id);
}

// Makes the ranks that wait in this join take part in collectives again: all ranks have joined, or the join has failed.
// All complete tensors have been decided before.
void Coordinator::State::forget_joins(const TensorState& join) {
  ProcessSet& set = *find_process_set(join.process_set);
  if (!set.is_joined_by(join)) return;
  for (int rank : set.members) {
    TensorId& joined = set.joined[static_cast<size_t>(rank)];
    if (joined != join.id) continue;
    joined = kNoId;
    --set.num_joined;
    --num_joins[static_cast<size_t>(rank)];
    --num_joined;
    for (const auto& [name, id] : set.names) {
      TensorState* tensor = table.find(id);
      if (tensor->kind == HVL_JOIN || is_by_members(*tensor) || table.is_ready(*tensor, rank)) continue;
      ++tensor->num_needed;
    }
  }
}

// True for a join for which only joined ranks are ready: they wait until the others have no more data.
bool Coordinator::State::only_joins(const TensorState& tensor) {
  if (tensor.kind != HVL_JOIN) return false;
  const ProcessSet& set = *find_process_set(tensor.process_set);
  return std::all_of(set.members.begin(), set.members.end(),
                     [&](int rank) { return !table.is_ready(tensor, rank) || set.has_joined(rank); });
}

// Decides the complete tensors before another announcement of this rank is taken. If the rank has joined and another of
// its threads announces, tensors that were complete without the rank are still executed without it.
void Coordinator::State::before_more_of(int rank) {
  if (num_joins[static_cast<size_t>(rank)] > 0) decide_completed(&early);
}

// Ends the join: its last rank has joined, or it has failed because the ranks disagree. From now on, collectives need
// all ranks again.
void Coordinator::State::end_join() {
  if (join_is_complete) decide_completed(&early);
  join_is_complete = false;
}

// Returns the same tensor, with the ranks that have it ready, under another id that is not defined yet.
TensorState* Coordinator::State::with_new_id(TensorId id) {
  TensorState* tensor = table.add();
  TensorState* old = table.find(id);
  tensor->process_set = old->process_set;
  tensor->num_needed = old->num_needed;
  ProcessSet& set = *find_process_set(old->process_set);
  for (int rank : set.members) {
    if (table.is_ready(*old, rank)) table.add_ready(tensor, rank);
  }
  set.names[table.details(*old).signature.name] = tensor->id;
  std::replace(set.joined.begin(), set.joined.end(), id, tensor->id);  // in the ranks that wait in this join
  table.remove(old);
  return tensor;
}

std::vector<int32_t> Coordinator::State::absent_from(const TensorState& tensor) {
  std::vector<int32_t> absent;
  const ProcessSet& set = *find_process_set(tensor.process_set);
  if (set.num_joined == 0 && !is_by_members(tensor)) return absent;
  for (int rank : set.members) {
    if (!table.is_ready(tensor, rank)) absent.push_back(rank);
  }
  return absent;
}

// The participating ranks; empty: all.
std::vector<int> Coordinator::State::concerned_by(int32_t process_set, const std::vector<int32_t>& absent) {
  std::vector<int> concerned;
  if (process_set == 0 && absent.empty()) return concerned;
  const std::vector<int>& members = find_process_set(process_set)->members;
  if (absent.empty()) return members;
  std::set_difference(members.begin(), members.end(), absent.begin(), absent.end(), std::back_inserter(concerned));
  return concerned;
}

Status Coordinator::State::check_absent(const TensorState& tensor, const std::vector<int32_t>& absent) {
  if (absent.empty() || is_by_members(tensor)) return Status();
  const Signature& signature = table.details(tensor).signature;
  const bool needs_all = changes_process_sets(tensor.kind) || tensor.kind == HVL_JOIN;
  const bool needs_root = has_root(tensor.kind);
  if (!needs_all && !(needs_root && std::binary_search(absent.begin(), absent.end(), signature.root))) return Status();
  return Status(HVL_INVALID_ARGUMENT, std::string(name_of(tensor.kind)) + " '" + signature.name + "' needs " +
                                          text_of_ranks({absent.begin(), absent.end()}) + ", which " +
                                          (absent.size() == 1 ? "has" : "have") + " joined.");
}

}  // namespace hvl
