// The part of the engine that runs the log.

#include <cstdlib>
#include <utility>

#include "engine.h"

namespace hvl {

namespace {

// So many bytes of a batch are worth waking those whose results are among them before the batch ends: they will want
// the processor that the engine works on.
constexpr uint64_t kWorthWaking = 4 << 20;

}  // namespace

Status Engine::apply(const Record& record) {
  switch (record.type) {
    case Record::Type::kDefine: return define(record);
    case Record::Type::kExecute: return execute(record.ids);
    case Record::Type::kError: return fail(record);
    case Record::Type::kEvict: return evict(record);
    case Record::Type::kShutdown: break;
  }
  if (record.status == HVL_JOB_BROKEN) return Status(HVL_JOB_BROKEN, record.text);
  flush_before_leaving();
  end(Status(HVL_SHUT_DOWN, record.text));
  return Status();
}

Status Engine::define(const Record& record) {
  const size_t gathered = record.signature.kind == HVL_ALLGATHER ? record.signature.tensors.size() : 0;
  if (record.first_dims.size() != gathered * static_cast<size_t>(options_.size)) {
    return Status(HVL_JOB_BROKEN, "the log defines '" + record.signature.name + "' for another number of ranks");
  }
  Known& known = known_[record.id];
  known.signature = record.signature;
  known.first_dims = record.first_dims;
  auto waiting = in_full_.find(key_of(record.signature.process_set, record.signature.name));
  if (waiting != in_full_.end()) {
    known.tensor = std::move(waiting->second);
    in_full_.erase(waiting);
  }
  if (known.tensor != nullptr) {
    known.tensor->id = record.id;
    known.tensor->agreed = nullptr;
  }
  return Status();
}

Status Engine::evict(const Record& record) {
  Status status;
  ready_.ids.clear();
  for (TensorId id : record.ids) {
    auto known = known_.find(id);
    if (known == known_.end()) continue;
    std::shared_ptr<NamedTensor> tensor = std::move(known->second.tensor);
    known_.erase(known);
    if (tensor == nullptr || tensor->id != id) continue;
    const bool announced_by_id = tensor->entry != nullptr && !tensor->announced_in_full;
    queue_.forget_id(tensor.get());
    // The coordinator has dropped what was announced by this id: say it again in full.
    if (announced_by_id && status.ok()) status = announce(tensor.get(), &ready_);
    if (announced_by_id && !status.ok()) in_full_[tensor->key] = tensor;  // where end() finds it
  }
  return status;
}

Status Engine::fail(const Record& record) {
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

Status Engine::execute(const std::vector<TensorId>& ids) {
  if (ids.empty()) return Status(HVL_JOB_BROKEN, "the log asks for a batch without tensors");
  tensors_.clear();
  for (TensorId id : ids) {
    auto known = known_.find(id);
    if (known == known_.end() || known->second.tensor == nullptr || known->second.tensor->entry == nullptr) {
      return Status(HVL_JOB_BROKEN, "the log asks for a tensor that this rank has not announced (id " +
                                        std::to_string(id) + "): please report this as a defect of horovodlike");
    }
    tensors_.push_back(known->second.tensor.get());
  }
  counters_.batches.fetch_add(1, std::memory_order_relaxed);
  num_completed_ = 0;
  const Known& first = known_.at(ids.front());
  num_done_ = 0;
  Status status;
  switch (first.signature.kind) {
    case HVL_ALLGATHER: status = prepare_allgather(first); break;
    case HVL_REDUCESCATTER: prepare_reducescatter(); break;
    default: prepare_batch();
  }
  return status.ok() ? go_on() : status;
}

Status Engine::go_on() {
  const Kind kind = tensors_.back()->entry->signature().kind;  // the last: others may be complete
  const bool one_by_one = kind == HVL_ALLGATHER || kind == HVL_REDUCESCATTER;
  Status status = one_by_one ? go_on_with_group() : go_on_with_batch();
  is_running_ = status.code() == HVL_IN_PROGRESS;
  return is_running_ ? Status() : status;
}

Reduction Engine::reduction_of(const Signature& signature, size_t tensor) const {
  Reduction reduction;
  reduction.dtype = signature.tensors[tensor].dtype;
  reduction.op = signature.op;
  reduction.prescale = signature.prescale;
  reduction.postscale = signature.postscale;
  reduction.divisor = signature.op == HVL_AVERAGE ? options_.size : 1;
  return reduction;
}

// Of a barrier: that all ranks asked is all there is to it, its batch is empty.
void Engine::prepare_batch() {
  batch_.clear();
  entry_ends_.clear();
  for (const NamedTensor* tensor : tensors_) {
    const Entry& entry = *tensor->entry;
    const Signature& signature = entry.signature();
    for (size_t t = 0; t < signature.tensors.size(); ++t) {
      uint64_t num_bytes = static_cast<uint64_t>(entry.operation->num_bytes[t]);
      batch_.add(entry.memory_of(t).input, entry.memory_of(t).output, num_bytes, reduction_of(signature, t));
    }
    entry_ends_.push_back(batch_.num_bytes());
  }
}

Status Engine::go_on_with_batch() {
  uint64_t last_wake = 0;
  const FinalBytes final_bytes = [&](uint64_t num_bytes) {
    while (num_completed_ < tensors_.size() && entry_ends_[num_completed_] <= num_bytes) {
      complete(tensors_[num_completed_++], Status());
    }
    if (num_bytes - last_wake < kWorthWaking) return;
    last_wake = num_bytes;
    handles_->wake_waiters();
  };
  Status status;
  if (batch_.num_bytes() > 0) {
    // The operation's kind and root are those of all; the last tensor is the last to complete.
    const Signature& signature = tensors_.back()->entry->signature();
    status = signature.kind == HVL_ALLREDUCE ? data_plane_->allreduce(batch_, final_bytes)
                                             : data_plane_->broadcast(batch_, signature.root, final_bytes);
  }
  if (status.ok()) final_bytes(batch_.num_bytes());  // also what has no bytes
  return status;
}

Status Engine::prepare_allgather(const Known& known) {
  const Entry& entry = *tensors_.front()->entry;
  const size_t size = static_cast<size_t>(options_.size);
  gathers_.clear();
  for (size_t t = 0; t < entry.signature().tensors.size(); ++t) {
    const TensorSignature& signature = entry.signature().tensors[t];
    hvl_output output{};
    output.ndim = static_cast<int32_t>(signature.shape.size());
    output.dtype = signature.dtype;
    int64_t row_bytes = static_cast<int64_t>(size_of(signature.dtype));
    for (size_t d = 1; d < signature.shape.size(); ++d) {
      output.shape[d] = signature.shape[d];
      row_bytes *= signature.shape[d];
    }
    Gather gather;
    gather.input = entry.memory_of(t).input;
    for (size_t rank = 0; rank < size; ++rank) {
      int64_t rows = known.first_dims[t * size + rank];
      output.shape[0] += rows;
      gather.block_bytes.push_back(static_cast<uint64_t>(rows * row_bytes));
    }
    output.num_bytes = output.shape[0] * row_bytes;
    output.data = malloc(static_cast<size_t>(output.num_bytes) + 1);  // + 1: not null when empty
    if (output.data == nullptr) {
      return Status(HVL_JOB_BROKEN, "no memory for " + std::to_string(output.num_bytes) +
                                        " bytes, the result of the allgather of '" + entry.signature().name + "' on " +
                                        waiter_.describe(options_.local_rank));
    }
    gather.output = static_cast<char*>(output.data);
    outputs_.push_back(output);
    gathers_.push_back(std::move(gather));
  }
  return Status();
}

void Engine::prepare_reducescatter() {
  const Entry& entry = *tensors_.front()->entry;
  const Signature& signature = entry.signature();
  scatters_.clear();
  for (size_t t = 0; t < signature.tensors.size(); ++t) {
    const int64_t rows = signature.tensors[t].shape[0];
    const int64_t row_bytes = rows > 0 ? entry.operation->num_bytes[t] / rows : 0;
    Scatter scatter{entry.memory_of(t).input, entry.memory_of(t).output, {}, reduction_of(signature, t)};
    for (int rank = 0; rank < options_.size; ++rank) {
      const int64_t mine = rows / options_.size + (rank < rows % options_.size ? 1 : 0);
      scatter.block_bytes.push_back(static_cast<uint64_t>(mine * row_bytes));
    }
    scatters_.push_back(std::move(scatter));
  }
}

// One tensor of the group after the other.
Status Engine::go_on_with_group() {
  const size_t count = tensors_.front()->entry->signature().tensors.size();
  const bool gathers = tensors_.front()->entry->signature().kind == HVL_ALLGATHER;
  for (; num_done_ < count; ++num_done_) {
    Status status =
        gathers ? data_plane_->allgather(gathers_[num_done_]) : data_plane_->reducescatter(scatters_[num_done_]);
    if (!status.ok()) return status;
  }
  complete(tensors_.front(), Status(), std::move(outputs_));
  outputs_.clear();
  return Status();
}

}  // namespace hvl
