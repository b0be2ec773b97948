// The part of the engine that runs the log.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

#include "engine/engine.h"
#include "negotiate/coordinator.h"

namespace hvl {

Status Engine::apply(const Record& record) {
  switch (record.type) {
    case Record::Type::kDefine: return define(record);
    case Record::Type::kExecute: return execute(record);
    case Record::Type::kError: return fail(record);
    case Record::Type::kEvict: return evict(record);
    case Record::Type::kShutdown: break;
  }
  if (record.status == HVL_JOB_BROKEN) return Status(HVL_JOB_BROKEN, record.text);
  leaving_since_ = now_ns();
  why_it_ended_ = record.text;
  return leave();
}

Status Engine::define(const Record& record) {
  const bool varies = allocates(record.signature.kind);
  if (record.varying.size() != (varies ? record.varying_per_rank * static_cast<size_t>(options_.size) : 0)) {
    return Status(HVL_JOB_BROKEN, "the log defines '" + record.signature.name + "' for another number of ranks");
  }
  if (record.signature.kind == HVL_ADD_PROCESS_SET && record.signature.arguments.back() >= options_.size) {
    return Status(HVL_JOB_BROKEN, "the log defines a process set of ranks that do not exist");
  }
  if (record.signature.kind == HVL_ALLTOALL) {
    const auto team = process_sets_.find(record.signature.process_set);
    if (team == process_sets_.end() ||
        record.varying_per_rank != record.signature.tensors.size() * (1 + team->second->size())) {
      return Status(HVL_JOB_BROKEN, "the log defines '" + record.signature.name + "' for another process set");
    }
  }
  if (record.replaces != 0) {
    const bool is_absent = std::binary_search(record.absent.begin(), record.absent.end(), options_.rank);
    Status status = forget(record.replaces, !is_absent);
    if (!status.ok()) return status;
  }
  Known& known = known_[record.id];
  known.signature = record.signature;
  known.varying = record.varying;
  known.varying_per_rank = record.varying_per_rank;
  adopt(record.id, &known);
  if (known.tensor != nullptr) known.tensor->agreed = nullptr;
  return Status();
}

// What this rank has announced in full has got an id.
void Engine::adopt(TensorId id, Known* known) {
  auto waiting = in_full_.find(key_of(known->signature.process_set, known->signature.name));
  if (waiting == in_full_.end()) return;
  known->tensor = std::move(waiting->second);
  known->tensor->id = id;
  in_full_.erase(waiting);
}

Status Engine::evict(const Record& record) {
  Status status;
  for (TensorId id : record.ids) {
    const Status forgotten = forget(id, false);
    if (status.ok()) status = forgotten;
  }
  return status;
}

// The id stands for nothing any more. `keeps_announcement`: what this rank has announced by it counts as announced in
// full; else the coordinator has dropped that or will, and it is said again.
Status Engine::forget(TensorId id, bool keeps_announcement) {
  auto known = known_.find(id);
  if (known == known_.end()) return Status();
  const std::shared_ptr<NamedTensor> tensor = std::move(known->second.tensor);
  known_.erase(known);
  if (tensor == nullptr || tensor->id != id) return Status();
  queue_.forget_id(tensor.get());
  if (tensor->entry == nullptr) return Status();
  in_full_[tensor->key] = tensor;
  // What is announced in full already stays so: the coordinator gets it only after this, because this rank had joined.
  if (tensor->announced_in_full) return Status();
  tensor->announced_in_full = true;
  if (keeps_announcement) return Status();
  ready_.ids.clear();
  return announce(tensor.get(), &ready_);
}

Status Engine::fail(const Record& record) {
  if (std::binary_search(record.absent.begin(), record.absent.end(), options_.rank)) return Status();
  std::string key = key_of(record.signature.process_set, record.signature.name);
  std::shared_ptr<NamedTensor> tensor;
  auto waiting = in_full_.find(key);
  if (waiting != in_full_.end()) {
    tensor = std::move(waiting->second);
    in_full_.erase(waiting);
  } else {
    for (auto& known : known_) {
      if (known.second.tensor != nullptr && known.second.tensor->key == key) tensor = known.second.tensor;
    }
  }
  if (tensor != nullptr && tensor->entry != nullptr) complete(tensor.get(), Status(record.status, record.text));
  return Status();
}

// All ranks count what is executed; those that take no part have nothing else to do with it.
Status Engine::execute(const Record& record) {
  const auto first = record.ids.empty() ? known_.end() : known_.find(record.ids.front());
  if (first == known_.end())
    return Status(HVL_JOB_BROKEN, "the log asks for a batch of tensors that it has not defined");
  const Known& known = first->second;
  ++num_executed_;
  team_ = team_without(known.signature.process_set, record.absent);
  if (!team_->is_member()) return Status();
  Status status = find_tensors(record.ids);
  if (!status.ok()) return status;
  switch (known.signature.kind) {
    case HVL_JOIN: return complete_with(record.last_joined);
    case HVL_ADD_PROCESS_SET:
    case HVL_REMOVE_PROCESS_SET: return change_process_sets(known.signature);
    default: break;
  }
  note_begin();
  is_on_gpu_ = known.signature.device == HVL_CUDA;
  if (is_on_gpu_) {
    status = begin_on_gpu();
  } else {
    if (autotuner_ != nullptr && known.signature.kind == HVL_ALLREDUCE) tune();
    data_plane_->begin(team_, num_executed_);
  }
  if (status.ok()) status = prepare(known);
  return status.ok() ? go_on() : status;
}

TeamPtr Engine::team_without(int32_t process_set, const std::vector<int32_t>& absent) const {
  const TeamPtr& all = process_sets_.at(process_set);
  if (absent.empty()) return all;
  std::vector<int> present;
  std::set_difference(all->ranks.begin(), all->ranks.end(), absent.begin(), absent.end(), std::back_inserter(present));
  auto team = std::make_shared<Team>(std::move(present), options_.rank);
  team->is_whole = false;
  return team;
}

Status Engine::find_tensors(const std::vector<TensorId>& ids) {
  tensors_.clear();
  for (TensorId id : ids) {
    auto known = known_.find(id);
    // It may have been defined while this rank had joined, and has not changed since.
    if (known != known_.end() && known->second.tensor == nullptr) adopt(id, &known->second);
    if (known == known_.end() || known->second.tensor == nullptr || known->second.tensor->entry == nullptr) {
      return Status(HVL_JOB_BROKEN, "the log asks for a tensor that this rank has not announced (id " +
                                        std::to_string(id) + "): please report this as a defect of horovodlike");
    }
    tensors_.push_back(known->second.tensor.get());
  }
  return Status();
}

// Its output is one int64.
Status Engine::complete_with(int64_t number) {
  char* data = nullptr;
  Status status = allocate(0, TensorSignature{HVL_INT64, {1}}, 1, &data);
  if (!status.ok()) return status;
  memcpy(data, &number, sizeof number);
  complete(tensors_.front(), Status(), std::move(outputs_));
  outputs_.clear();
  return Status();
}

// The coordinator has checked that it can be done, and does the same to its own list.
Status Engine::change_process_sets(const Signature& signature) {
  if (signature.kind == HVL_REMOVE_PROCESS_SET) {
    const auto removed = process_sets_.find(static_cast<int32_t>(signature.arguments[0]));
    if (gpu_plane_ != nullptr) gpu_plane_->forget(removed->second);
    process_sets_.erase(removed);
    complete(tensors_.front(), Status());
    return Status();
  }
  const int32_t id = next_process_set(process_sets_);
  std::vector<int> members(signature.arguments.begin(), signature.arguments.end());
  process_sets_[id] = std::make_shared<Team>(std::move(members), options_.rank);
  return complete_with(id);
}

}  // namespace hvl
