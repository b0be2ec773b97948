// The part of the engine that does the collective that the log asks for.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "engine/engine.h"

namespace hvl {

namespace {

// So many bytes of a batch are worth waking those whose results are among them before the batch ends: they will want
// the processor that the engine works on.
constexpr uint64_t kWorthWaking = 4 << 20;

int64_t bytes_of_row(const TensorSignature& tensor) {
  int64_t num_bytes = static_cast<int64_t>(size_of(tensor.dtype));
  for (size_t d = 1; d < tensor.shape.size(); ++d) num_bytes *= tensor.shape[d];
  return num_bytes;
}

uint64_t to_bytes(int64_t rows, int64_t row_bytes) { return static_cast<uint64_t>(rows * row_bytes); }

}  // namespace

Status Engine::prepare(const Known& first) {
  num_completed_ = 0;
  num_done_ = 0;
  switch (first.signature.kind) {
    case HVL_ALLGATHER: return hold_until_allocated(prepare_allgather(first));
    case HVL_ALLTOALL: return hold_until_allocated(prepare_alltoall(first));
    case HVL_REDUCESCATTER: prepare_reducescatter(); return Status();
    default: prepare_batch();
  }
  if (first.signature.op == HVL_ADASUM && is_on_gpu_) return prepare_adasum_on_gpu(first);
  if (first.signature.op == HVL_ADASUM) {
    adasum_.begin(batch_, *team_, averaged_by_adasum(first.signature.process_set));
  }
  return Status();
}

Status Engine::go_on() {
  const Signature& signature = tensors_.back()->entry->signature();  // the last: others may be complete
  Status status;
  if (allocates(signature.kind) || signature.kind == HVL_REDUCESCATTER) {
    status = go_on_with_group();
  } else {
    status = signature.op == HVL_ADASUM ? go_on_with_adasum() : go_on_with_batch();
  }
  is_running_ = status.code() == HVL_IN_PROGRESS;
  has_failed_ = !status.ok() && !is_running_;
  if (status.ok()) note_end();
  return is_running_ ? Status() : status;
}

Reduction Engine::reduction_of(const Signature& signature, size_t tensor) const {
  Reduction reduction;
  reduction.dtype = signature.tensors[tensor].dtype;
  reduction.op = signature.op;
  reduction.prescale = signature.prescale;
  reduction.postscale = signature.postscale;
  const Team& counted = options_.average_counts_joined ? *process_sets_.at(signature.process_set) : *team_;
  reduction.divisor = signature.op == HVL_AVERAGE ? static_cast<int>(counted.size()) : 1;
  return reduction;
}

// Those of each host.
std::vector<AveragedMembers> Engine::averaged_by_adasum(int32_t process_set) const {
  std::vector<AveragedMembers> averaged;
  if (!options_.hierarchical_adasum) return averaged;
  const auto host_of = [this](int rank) {
    return options_.hosts.empty() ? 0 : options_.hosts[static_cast<size_t>(rank)];
  };
  const Team& counted = options_.average_counts_joined ? *process_sets_.at(process_set) : *team_;
  std::map<int, size_t> group_of;  // by host
  for (size_t place = 0; place < team_->size(); ++place) {
    const int host = host_of(team_->ranks[place]);
    const auto [found, is_new] = group_of.emplace(host, averaged.size());
    if (is_new) {
      const auto is_there = [&](int rank) { return host_of(rank) == host; };
      const auto divisor = std::count_if(counted.ranks.begin(), counted.ranks.end(), is_there);
      averaged.push_back({{}, static_cast<int>(divisor)});
    }
    averaged[found->second].places.push_back(place);
  }
  return averaged;
}

// Of a barrier: that all ranks asked is all there is to it, its batch is empty.
void Engine::prepare_batch() {
  batch_.clear();
  entry_ends_.clear();
  for (const NamedTensor* tensor : tensors_) {
    const PendingRequest& entry = *tensor->entry;
    const Signature& signature = entry.signature();
    for (size_t t = 0; t < signature.tensors.size(); ++t) {
      uint64_t num_bytes = static_cast<uint64_t>(entry.operation->num_bytes[t]);
      batch_.add(entry.memory_of(t).input, entry.memory_of(t).output, num_bytes, reduction_of(signature, t));
    }
    entry_ends_.push_back(batch_.num_bytes());
  }
  if (data_fault_.is_armed() && tensors_.back()->entry->signature().kind == HVL_ALLREDUCE) {
    batch_.interrupt_halfway([this] { data_fault_.trigger(); });
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
    status = signature.kind == HVL_ALLREDUCE ? plane()->allreduce(batch_, final_bytes)
                                             : plane()->broadcast(batch_, team_->place_of(signature.root), final_bytes);
  }
  if (status.ok()) final_bytes(batch_.num_bytes());  // also what has no bytes
  return status;
}

// The output of this index, with as many rows and otherwise the shape described.
Status Engine::allocate(size_t index, const TensorSignature& described, int64_t rows, char** data) {
  hvl_output output{};
  output.ndim = static_cast<int32_t>(described.shape.size());
  output.dtype = described.dtype;
  std::copy(described.shape.begin(), described.shape.end(), output.shape);
  output.shape[0] = rows;
  output.num_bytes = rows * bytes_of_row(described);
  const PendingRequest& entry = *tensors_.front()->entry;
  const hvl_callbacks& callbacks = entry.callbacks;
  const bool is_callers = callbacks.allocate != nullptr;
  output.data = is_callers ? allocate_by_caller(callbacks, static_cast<int32_t>(index), output)
                           : malloc(static_cast<size_t>(output.num_bytes) + 1);  // + 1: not null when empty
  if (output.data == nullptr) {
    return Status(HVL_JOB_BROKEN, "no memory for " + std::to_string(output.num_bytes) + " bytes, the result of the " +
                                      name_of(entry.signature().kind) + " of '" + entry.signature().name + "' on " +
                                      waiter_.describe(options_.local_rank));
  }
  *data = static_cast<char*>(output.data);
  if (!is_callers) outputs_.push_back(output);
  return Status();
}

Status Engine::prepare_allgather(const Known& known) {
  const PendingRequest& entry = *tensors_.front()->entry;
  gathers_.clear();
  for (size_t t = 0; t < entry.signature().tensors.size(); ++t) {
    int64_t rows = 0;
    for (int rank : team_->ranks) rows += known.varying_of(rank)[t];
    char* next = nullptr;
    Status status = allocate(t, entry.signature().tensors[t], rows, &next);
    if (!status.ok()) return status;
    Gather gather{entry.memory_of(t).input, {}};
    const int64_t row_bytes = bytes_of_row(entry.signature().tensors[t]);
    for (int rank : team_->ranks) {
      gather.blocks.push_back({next, to_bytes(known.varying_of(rank)[t], row_bytes)});
      next += gather.blocks.back().num_bytes;
    }
    gathers_.push_back(std::move(gather));
  }
  return Status();
}

Status Engine::prepare_alltoall(const Known& known) {
  exchanges_.clear();
  Status status;
  for (size_t t = 0; status.ok() && t < known.signature.tensors.size(); ++t) status = prepare_exchange(known, t);
  return status;
}

// The rows from every rank to every other one are known. Those that a rank has for one that takes no part stay.
Status Engine::prepare_exchange(const Known& known, size_t tensor) {
  const PendingRequest& entry = *tensors_.front()->entry;
  const Signature& signature = entry.signature();
  const Team& members = *process_sets_.at(signature.process_set);
  const int64_t row_bytes = bytes_of_row(signature.tensors[tensor]);
  const size_t splits_begin = signature.tensors.size() + tensor * members.size();
  const auto rows_between = [&](int from, int to) {
    return known.varying_of(from)[splits_begin + static_cast<size_t>(members.place_of(to))];
  };
  int64_t rows = 0;
  Exchange exchange{};
  for (int from : team_->ranks) {
    rows += rows_between(from, options_.rank);
    for (int to : team_->ranks) {
      exchange.longest = std::max(exchange.longest, to_bytes(rows_between(from, to), row_bytes));
    }
  }
  char* to = nullptr;
  Status status = allocate(2 * tensor, signature.tensors[tensor], rows, &to);
  if (!status.ok()) return status;
  char* received = nullptr;
  status = allocate(2 * tensor + 1, TensorSignature{HVL_INT32, {0}}, static_cast<int64_t>(members.size()), &received);
  if (!status.ok()) return status;
  const char* from = entry.memory_of(tensor).input;
  for (int rank : members.ranks) {
    const uint64_t num_sent = to_bytes(rows_between(options_.rank, rank), row_bytes);
    const bool takes_part = team_->contains(rank);
    const int64_t rows_received = takes_part ? rows_between(rank, options_.rank) : 0;
    const int32_t split = static_cast<int32_t>(rows_received);  // splits are no larger
    memcpy(received, &split, sizeof split);
    received += sizeof split;
    if (takes_part) {
      exchange.sent.push_back({from, num_sent});
      exchange.received.push_back({to, to_bytes(rows_received, row_bytes)});
    }
    from += num_sent;
    to += to_bytes(rows_received, row_bytes);
  }
  exchanges_.push_back(std::move(exchange));
  return Status();
}

// Each member of the process set has its rows, whether or not it takes part.
void Engine::prepare_reducescatter() {
  const PendingRequest& entry = *tensors_.front()->entry;
  const Signature& signature = entry.signature();
  const Team& members = *process_sets_.at(signature.process_set);
  const int64_t size = static_cast<int64_t>(members.size());
  scatters_.clear();
  for (size_t t = 0; t < signature.tensors.size(); ++t) {
    const int64_t rows = signature.tensors[t].shape[0];
    const int64_t row_bytes = bytes_of_row(signature.tensors[t]);
    const char* next = entry.memory_of(t).input;
    Scatter scatter{{}, entry.memory_of(t).output, reduction_of(signature, t)};
    for (int64_t place = 0; place < size; ++place) {
      const uint64_t num_bytes = to_bytes(rows / size + (place < rows % size ? 1 : 0), row_bytes);
      if (team_->contains(members.ranks[static_cast<size_t>(place)])) scatter.blocks.push_back({next, num_bytes});
      next += num_bytes;
    }
    scatters_.push_back(std::move(scatter));
  }
}

Status Engine::go_on_with_adasum() {
  Status status = is_on_gpu_ ? gpu_plane_->on_host() : adasum_.go_on(data_plane_.get());
  if (status.ok()) complete(tensors_.front(), Status());
  return status;
}

// One tensor of the group after the other.
Status Engine::go_on_with_group() {
  const Signature& signature = tensors_.front()->entry->signature();
  for (; num_done_ < signature.tensors.size(); ++num_done_) {
    Status status;
    switch (signature.kind) {
      case HVL_ALLGATHER: status = plane()->allgather(gathers_[num_done_]); break;
      case HVL_ALLTOALL: status = plane()->alltoall(exchanges_[num_done_]); break;
      default: status = plane()->reducescatter(scatters_[num_done_]);
    }
    if (!status.ok()) return status;
  }
  complete(tensors_.front(), Status(), std::move(outputs_));
  outputs_.clear();
  return Status();
}

}  // namespace hvl
