#include "engine/negotiator.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "negotiate/coordinator.h"

namespace hvl {

Negotiator::Negotiator(EngineContext* context, RequestTable* requests, Executor* executor, GpuExecutor* gpu)
    : context_(*context), requests_(*requests), executor_(*executor), gpu_(*gpu) {
  std::vector<int> all_ranks(static_cast<size_t>(context_.options.size));
  std::iota(all_ranks.begin(), all_ranks.end(), 0);
  process_sets_[0] = std::make_shared<Team>(std::move(all_ranks), context_.options.rank);
}

Status Negotiator::announce_stop() {
  stop_announced_at_ = now_ns();
  Message message;
  message.type = Message::Type::kShutdown;
  message.text = context_.stop_reason;
  return context_.control->send(message);
}

Status Negotiator::submit() {
  context_.queue.take(&new_requests_);
  Status status;
  ready_.ids.clear();
  for (std::unique_ptr<PendingRequest>& request : new_requests_) {
    NamedTensor* tensor = requests_.add(std::move(request));
    const Status valid = check_process_set(tensor->request->signature());
    if (!valid.ok()) {
      tensor->announced_in_full = false;
      requests_.complete(tensor, valid);
      continue;
    }
    if (status.ok()) status = announce(tensor);
    if (!status.ok()) requests_.list_in_full(*tensor);  // so that it fails when the job ends
  }
  new_requests_.clear();
  context_.handles->wake_waiters();  // threads that wait for invalid requests
  if (status.ok() && !ready_.ids.empty()) status = context_.control->send(ready_);
  return status;
}

void Negotiator::gather_queued() {
  do {
    for (std::unique_ptr<PendingRequest>& request : new_requests_) {
      if (request != nullptr) requests_.list_in_full(*requests_.add(std::move(request)));
    }
    new_requests_.clear();
    context_.queue.take(&new_requests_);
  } while (!new_requests_.empty());
}

Status Negotiator::check_process_set(const Signature& signature) const {
  const auto team = process_sets_.find(signature.process_set);
  if (team == process_sets_.end()) {
    return Status(HVL_INVALID_ARGUMENT, "'" + signature.name + "' is for process set " +
                                            std::to_string(signature.process_set) +
                                            ", which does not exist (any more)");
  }
  if (team->second->is_member()) return Status();
  return Status(HVL_INVALID_ARGUMENT, "rank " + std::to_string(context_.options.rank) +
                                          " is not a member of process set " + std::to_string(signature.process_set) +
                                          ", for which it has enqueued '" + signature.name + "'");
}

// Announces the request: by the tensor's id, which is collected in `ready_`, or in full.
Status Negotiator::announce(NamedTensor* tensor) {
  tensor->announced_in_full = !requests_.is_agreed(tensor);
  if (!tensor->announced_in_full) {
    ready_.ids.push_back(tensor->id);
    return Status();
  }
  if (!ready_.ids.empty()) {  // keep the order in which the framework enqueued
    Status status = context_.control->send(ready_);
    ready_.ids.clear();
    if (!status.ok()) return status;
  }
  context_.counters.negotiated_in_full.fetch_add(1, std::memory_order_relaxed);
  requests_.list_in_full(*tensor);
  Message request;
  request.type = Message::Type::kRequest;
  request.signature = tensor->request->signature();
  return context_.control->send(request);
}

Status Negotiator::run_next(bool* found) {
  const Status status = context_.control->next(&record_, found);
  if (!status.ok() || !*found) return status;
  last_record_ = now_ns();
  return apply(record_);
}

Status Negotiator::apply(const Record& record) {
  switch (record.type) {
    case Record::Type::kDefine: return define(record);
    case Record::Type::kExecute: return execute(record);
    case Record::Type::kError: fail(record); return Status();
    case Record::Type::kEvict: return evict(record);
    case Record::Type::kShutdown: break;
  }
  if (record.status == HVL_JOB_BROKEN) return Status(HVL_JOB_BROKEN, record.text);
  leaving_since_ = now_ns();
  why_it_ended_ = record.text;
  return Status();
}

Status Negotiator::check_definition(const Record& record) const {
  const Signature& signature = record.signature;
  const size_t size = static_cast<size_t>(context_.options.size);
  if (record.varying.size() != (allocates(signature.kind) ? record.varying_per_rank * size : 0)) {
    return Status(HVL_JOB_BROKEN, "the log defines '" + signature.name + "' for another number of ranks");
  }
  if (signature.kind == HVL_ADD_PROCESS_SET && signature.arguments.back() >= context_.options.size) {
    return Status(HVL_JOB_BROKEN, "the log defines a process set of ranks that do not exist");
  }
  if (signature.kind == HVL_ALLTOALL) {
    const auto team = process_sets_.find(signature.process_set);
    if (team == process_sets_.end() ||
        record.varying_per_rank != signature.tensors.size() * (1 + team->second->size())) {
      return Status(HVL_JOB_BROKEN, "the log defines '" + signature.name + "' for another process set");
    }
  }
  return Status();
}

Status Negotiator::define(const Record& record) {
  Status status = check_definition(record);
  if (status.ok() && record.replaces != 0) {
    const bool is_absent = std::binary_search(record.absent.begin(), record.absent.end(), context_.options.rank);
    status = forget(record.replaces, !is_absent);
  }
  if (status.ok()) requests_.define(record);
  return status;
}

Status Negotiator::evict(const Record& record) {
  Status status;
  for (TensorId id : record.ids) {
    const Status forgotten = forget(id, false);
    if (status.ok()) status = forgotten;
  }
  return status;
}

// `keeps_announcement`: the coordinator counts an announcement by this id as one in full. Otherwise it has dropped the
// announcement, or will drop it, and this rank announces the request again.
Status Negotiator::forget(TensorId id, bool keeps_announcement) {
  const std::shared_ptr<NamedTensor> tensor = requests_.forget(id);
  if (tensor == nullptr || keeps_announcement) return Status();
  ready_.ids.clear();
  return announce(tensor.get());
}

void Negotiator::fail(const Record& record) {
  if (std::binary_search(record.absent.begin(), record.absent.end(), context_.options.rank)) return;
  const std::shared_ptr<NamedTensor> tensor = requests_.take_by_name(record.signature);
  if (tensor != nullptr && tensor->request != nullptr) {
    requests_.complete(tensor.get(), Status(record.status, record.text));
  }
}

// All ranks count the collectives; those that take no part do nothing else.
Status Negotiator::execute(const Record& record) {
  const Definition* definition = record.ids.empty() ? nullptr : requests_.find(record.ids.front());
  if (definition == nullptr) {
    return Status(HVL_JOB_BROKEN, "the log asks for a batch of tensors that it has not defined");
  }
  next_.number = ++num_executed_;
  next_.begun_at = last_record_;
  const TeamPtr& members = process_sets_.at(definition->signature.process_set);
  next_.members = members.get();
  next_.team = team_without(members, record.absent);
  next_.counted = context_.options.average_counts_joined ? next_.members : next_.team.get();
  if (!next_.team->is_member()) {
    return definition->signature.is_by_members() ? change_process_sets(definition->signature, nullptr) : Status();
  }
  const Status status = requests_.find_tensors(record.ids, &next_.tensors);
  if (!status.ok()) return status;
  switch (definition->signature.kind) {
    case HVL_JOIN: return executor_.complete_with(next_.tensors.front(), record.last_joined);
    case HVL_ADD_PROCESS_SET:
    case HVL_REMOVE_PROCESS_SET: return change_process_sets(definition->signature, next_.tensors.front());
    case HVL_ALLREDUCE:
    case HVL_ALLGATHER:
    case HVL_BROADCAST:
    case HVL_BARRIER:
    case HVL_REDUCESCATTER:
    case HVL_ALLTOALL:
    case HVL_GATHER:
    case HVL_SCATTER:
    case HVL_REDUCE: return executor_.start(&next_, *definition);
  }
  __builtin_unreachable();
}

TeamPtr Negotiator::team_without(const TeamPtr& members, const std::vector<int32_t>& absent) const {
  if (absent.empty()) return members;
  std::vector<int> present;
  std::set_difference(members->ranks.begin(), members->ranks.end(), absent.begin(), absent.end(),
                      std::back_inserter(present));
  auto team = std::make_shared<Team>(std::move(present), context_.options.rank);
  team->is_whole = false;
  return team;
}

// The coordinator has checked the change, and makes it in its own list, too. `tensor`: null if this rank has not
// requested the change.
Status Negotiator::change_process_sets(const Signature& signature, NamedTensor* tensor) {
  if (signature.kind == HVL_REMOVE_PROCESS_SET) {
    const auto removed = process_sets_.find(static_cast<int32_t>(signature.arguments[0]));
    gpu_.forget(removed->second);
    context_.messenger.remove_process_set(removed->first);
    process_sets_.erase(removed);
    requests_.complete(tensor, Status());
    return Status();
  }
  const int32_t id = next_process_set(process_sets_);
  std::vector<int> members(signature.arguments.begin(), signature.arguments.end());
  context_.messenger.add_process_set(id, members);
  process_sets_[id] = std::make_shared<Team>(std::move(members), context_.options.rank);
  return tensor == nullptr ? Status() : executor_.complete_with(tensor, id);
}

}  // namespace hvl
