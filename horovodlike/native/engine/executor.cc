#include "engine/executor.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

#include "base/memory.h"
#include "collective/blocks.h"

namespace hvl {

namespace {

// While a batch runs, the threads whose results are complete are woken once per this many bytes. Not more often: they
// compete for the processor on which the engine works.
constexpr uint64_t kWorthWaking = 4 << 20;

int64_t bytes_of_row(const TensorSignature& tensor) {
  int64_t num_bytes = static_cast<int64_t>(size_of(tensor.dtype));
  for (size_t d = 1; d < tensor.shape.size(); ++d) num_bytes *= tensor.shape[d];
  return num_bytes;
}

uint64_t to_bytes(int64_t rows, int64_t row_bytes) { return static_cast<uint64_t>(rows * row_bytes); }

// Groups the members by host, for an Adasum that combines the averages of hosts.
std::vector<AveragedMembers> averaged_by_host(const EngineOptions& options, const Team& team, const Team& counted) {
  std::vector<AveragedMembers> averaged;
  std::map<int, size_t> group_of;  // by host
  for (size_t place = 0; place < team.size(); ++place) {
    const int host = options.host_of(team.ranks[place]);
    const auto [found, is_new] = group_of.emplace(host, averaged.size());
    if (is_new) {
      const auto is_there = [&](int rank) { return options.host_of(rank) == host; };
      const auto divisor = std::count_if(counted.ranks.begin(), counted.ranks.end(), is_there);
      averaged.push_back({{}, static_cast<int>(divisor)});
    }
    averaged[found->second].places.push_back(place);
  }
  return averaged;
}

}  // namespace

Status Executor::start(Collective* collective, const Definition& definition) {
  std::swap(collective_, *collective);
  reporter_.begin(collective_);
  is_on_gpu_ = definition.signature.device == HVL_CUDA;
  const hvl_transport transport = context_.options.routes.find(definition.signature);
  Status status;
  if (is_on_gpu_) {
    status = gpu_.begin(collective_, transport);
  } else {
    if (definition.signature.kind == HVL_ALLREDUCE) tuner_.on_allreduce(collective_);
    cpu_plane_ = context_.plane_of(transport);
    cpu_plane_->begin(collective_.team, collective_.number);
  }
  if (status.ok()) status = prepare(definition);
  is_running_ = status.ok();
  return status.ok() && !needs_engine_thread() ? resume() : status;
}

Status Executor::prepare(const Definition& definition) {
  batch_.num_completed = 0;
  group_.num_done = 0;
  Status status;
  switch (definition.signature.kind) {
    case HVL_ALLGATHER: status = prepare_allgather(definition); break;
    case HVL_ALLTOALL: status = prepare_alltoall(definition); break;
    case HVL_GATHER: status = prepare_gather(definition); break;
    case HVL_SCATTER: prepare_scatter(); return Status();
    case HVL_REDUCESCATTER: prepare_reducescatter(); return Status();
    case HVL_ALLREDUCE:
    case HVL_BROADCAST:
    case HVL_BARRIER:
    case HVL_REDUCE: prepare_batch(); return definition.signature.op == HVL_ADASUM ? prepare_adasum() : Status();
    case HVL_JOIN:
    case HVL_ADD_PROCESS_SET:
    case HVL_REMOVE_PROCESS_SET: __builtin_unreachable();  // the negotiator carries them out
  }
  return status.ok() && is_on_gpu_ ? gpu_.hold_until_allocated() : status;
}

Status Executor::resume() {
  const Signature& signature = collective_.tensors.back()->request->signature();  // the last: others may be complete
  Status status;
  if (allocates(signature.kind) || signature.kind == HVL_REDUCESCATTER || signature.kind == HVL_SCATTER) {
    status = resume_group();
  } else {
    status = signature.op == HVL_ADASUM ? resume_adasum() : resume_batch();
  }
  is_running_ = status.code() == HVL_IN_PROGRESS;
  has_failed_ = !status.ok() && !is_running_;
  if (status.ok()) reporter_.end(collective_.team->size() > 1 ? plane()->transport() : HVL_BY_ENGINE);
  return is_running_ ? Status() : status;
}

Reduction Executor::reduction_of(const Signature& signature, size_t tensor) const {
  Reduction reduction;
  reduction.dtype = signature.tensors[tensor].dtype;
  reduction.op = signature.op;
  reduction.prescale = signature.prescale;
  reduction.postscale = signature.postscale;
  reduction.divisor = signature.op == HVL_AVERAGE ? static_cast<int>(collective_.counted->size()) : 1;
  return reduction;
}

Status Executor::prepare_adasum() {
  std::vector<AveragedMembers> averaged;
  if (context_.options.hierarchical_adasum) {
    averaged = averaged_by_host(context_.options, *collective_.team, *collective_.counted);
  }
  if (is_on_gpu_) return gpu_.prepare_adasum(batch_.batch, &adasum_, std::move(averaged));
  adasum_.begin(batch_.batch, *collective_.team, averaged);
  return Status();
}

void Executor::prepare_batch() {
  batch_.batch.clear();
  batch_.ends.clear();
  for (const NamedTensor* tensor : collective_.tensors) {
    const PendingRequest& request = *tensor->request;
    const Signature& signature = request.signature();
    for (size_t t = 0; t < signature.tensors.size(); ++t) {
      uint64_t num_bytes = static_cast<uint64_t>(request.operation->num_bytes[t]);
      batch_.batch.add(request.memory_of(t).input, request.memory_of(t).output, num_bytes, reduction_of(signature, t));
    }
    batch_.ends.push_back(batch_.batch.num_bytes());
  }
  if (fault_.is_armed() && collective_.tensors.back()->request->signature().kind == HVL_ALLREDUCE) {
    batch_.batch.interrupt_halfway([this] { fault_.trigger(); });
  }
}

Status Executor::resume_batch() {
  uint64_t last_wake = 0;
  const FinalBytes final_bytes = [&](uint64_t num_bytes) {
    while (batch_.num_completed < collective_.tensors.size() && batch_.ends[batch_.num_completed] <= num_bytes) {
      complete(collective_.tensors[batch_.num_completed++]);
    }
    if (num_bytes - last_wake < kWorthWaking) return;
    last_wake = num_bytes;
    context_.handles->wake_waiters();
  };
  Status status;
  if (batch_.batch.num_bytes() > 0) {
    // Kind and root are the same for all tensors of a batch. The last one is not complete yet.
    const Signature& signature = collective_.tensors.back()->request->signature();
    const int root = collective_.team->place_of(signature.root);
    switch (signature.kind) {
      case HVL_ALLREDUCE: status = plane()->allreduce(batch_.batch, final_bytes); break;
      case HVL_REDUCE: status = plane()->reduce_to(batch_.batch, root, final_bytes); break;
      case HVL_BROADCAST: status = plane()->broadcast(batch_.batch, root, final_bytes); break;
      case HVL_ALLGATHER:
      case HVL_BARRIER:
      case HVL_REDUCESCATTER:
      case HVL_ALLTOALL:
      case HVL_JOIN:
      case HVL_ADD_PROCESS_SET:
      case HVL_REMOVE_PROCESS_SET:
      case HVL_GATHER:
      case HVL_SCATTER: __builtin_unreachable();  // prepare() makes no batch with bytes for them
    }
  }
  if (status.ok()) final_bytes(batch_.batch.num_bytes());  // also tensors without bytes
  return status;
}

// Allocates the output `index`, with `rows` rows and otherwise the dtype and shape of `described`.
Status Executor::allocate(const PendingRequest& request, size_t index, const TensorSignature& described, int64_t rows,
                          char** data) {
  hvl_output output{};
  output.ndim = static_cast<int32_t>(described.shape.size());
  output.dtype = described.dtype;
  std::copy(described.shape.begin(), described.shape.end(), output.shape);
  output.shape[0] = rows;
  output.num_bytes = rows * bytes_of_row(described);
  const hvl_callbacks& callbacks = request.callbacks;
  const bool is_callers = callbacks.allocate != nullptr;
  const int32_t number = static_cast<int32_t>(index);
  if (!is_callers) {
    output.data = malloc(static_cast<size_t>(output.num_bytes) + 1);  // + 1: not null when empty
  } else {
    output.data = is_on_gpu_ ? gpu_.allocate_by_caller(callbacks, number, output)
                             : callbacks.allocate(callbacks.context, number, &output);
  }
  if (output.data == nullptr) {
    return Status(HVL_JOB_BROKEN, "no memory for " + std::to_string(output.num_bytes) + " bytes, the result of the " +
                                      name_of(request.signature().kind) + " of '" + request.signature().name + "' on " +
                                      context_.describe_self());
  }
  *data = static_cast<char*>(output.data);
  if (!is_callers) outputs_.push_back(output);
  return Status();
}

Status Executor::prepare_allgather(const Definition& definition) {
  const PendingRequest& request = collective_.first();
  group_.gathers.clear();
  for (size_t t = 0; t < request.signature().tensors.size(); ++t) {
    int64_t rows = 0;
    for (int rank : collective_.team->ranks) rows += definition.varying_of(rank)[t];
    char* next = nullptr;
    Status status = allocate(request, t, request.signature().tensors[t], rows, &next);
    if (!status.ok()) return status;
    Gather gather{request.memory_of(t).input, {}};
    const int64_t row_bytes = bytes_of_row(request.signature().tensors[t]);
    for (int rank : collective_.team->ranks) {
      gather.blocks.push_back({next, to_bytes(definition.varying_of(rank)[t], row_bytes)});
      next += gather.blocks.back().num_bytes;
    }
    group_.gathers.push_back(std::move(gather));
  }
  return Status();
}

// An exchange in which only the root receives.
Status Executor::prepare_gather(const Definition& definition) {
  const PendingRequest& request = collective_.first();
  const Signature& signature = request.signature();
  const Team& team = *collective_.team;
  group_.exchanges.clear();
  for (size_t t = 0; t < signature.tensors.size(); ++t) {
    int64_t rows = 0;
    std::vector<Block<char>> blocks;
    for (int rank : team.ranks) {
      rows += definition.varying_of(rank)[t];
      blocks.push_back({nullptr, to_bytes(definition.varying_of(rank)[t], bytes_of_row(signature.tensors[t]))});
    }
    char* output = nullptr;
    const bool is_root = signature.root == context_.options.rank;
    Status status = allocate(request, t, signature.tensors[t], is_root ? rows : 0, &output);
    if (!status.ok()) return status;
    const size_t root = static_cast<size_t>(team.place_of(signature.root));
    group_.exchanges.push_back(gather_to(root, team.mine, request.memory_of(t).input, output, blocks));
  }
  return Status();
}

// An exchange in which only the root sends. Its input has a block for each member, also for those that take no part.
void Executor::prepare_scatter() {
  const PendingRequest& request = collective_.first();
  const Signature& signature = request.signature();
  group_.exchanges.clear();
  for (size_t t = 0; t < signature.tensors.size(); ++t) {
    const uint64_t num_bytes = static_cast<uint64_t>(request.operation->num_bytes[t]);
    Exchange exchange{{}, {}, num_bytes};
    for (int rank : collective_.team->ranks) {
      const bool from_here = signature.root == context_.options.rank;
      const uint64_t offset = from_here ? static_cast<uint64_t>(collective_.members->place_of(rank)) * num_bytes : 0;
      exchange.sent.push_back({request.memory_of(t).input + offset, from_here ? num_bytes : 0});
      exchange.received.push_back({request.memory_of(t).output, rank == signature.root ? num_bytes : 0});
    }
    group_.exchanges.push_back(std::move(exchange));
  }
}

Status Executor::prepare_alltoall(const Definition& definition) {
  group_.exchanges.clear();
  Status status;
  for (size_t t = 0; status.ok() && t < definition.signature.tensors.size(); ++t)
    status = prepare_exchange(definition, t);
  return status;
}

// `definition` has the number of rows from every rank to every other. Rows for a rank that takes no part are not sent.
Status Executor::prepare_exchange(const Definition& definition, size_t tensor) {
  const PendingRequest& request = collective_.first();
  const Signature& signature = request.signature();
  const Team& members = *collective_.members;
  const int64_t row_bytes = bytes_of_row(signature.tensors[tensor]);
  const size_t splits_begin = signature.tensors.size() + tensor * members.size();
  const auto rows_between = [&](int from, int to) {
    return definition.varying_of(from)[splits_begin + static_cast<size_t>(members.place_of(to))];
  };
  int64_t rows = 0;
  Exchange exchange{};
  for (int from : collective_.team->ranks) {
    rows += rows_between(from, context_.options.rank);
    for (int to : collective_.team->ranks) {
      exchange.longest = std::max(exchange.longest, to_bytes(rows_between(from, to), row_bytes));
    }
  }
  char* to = nullptr;
  Status status = allocate(request, 2 * tensor, signature.tensors[tensor], rows, &to);
  if (!status.ok()) return status;
  char* received = nullptr;
  status = allocate(request, 2 * tensor + 1, TensorSignature{HVL_INT32, {0}}, static_cast<int64_t>(members.size()),
                    &received);
  if (!status.ok()) return status;
  const char* from = request.memory_of(tensor).input;
  for (int rank : members.ranks) {
    const uint64_t num_sent = to_bytes(rows_between(context_.options.rank, rank), row_bytes);
    const bool takes_part = collective_.team->contains(rank);
    const int64_t rows_received = takes_part ? rows_between(rank, context_.options.rank) : 0;
    const int32_t split = static_cast<int32_t>(rows_received);  // a split is less than 2^31
    memcpy(received, &split, sizeof split);
    received += sizeof split;
    if (takes_part) {
      exchange.sent.push_back({from, num_sent});
      exchange.received.push_back({to, to_bytes(rows_received, row_bytes)});
    }
    from += num_sent;
    to += to_bytes(rows_received, row_bytes);
  }
  group_.exchanges.push_back(std::move(exchange));
  return Status();
}

// The input has a block of rows for each member of the process set, also for those that take no part.
void Executor::prepare_reducescatter() {
  const PendingRequest& request = collective_.first();
  const Signature& signature = request.signature();
  const Team& members = *collective_.members;
  const int64_t size = static_cast<int64_t>(members.size());
  group_.scatters.clear();
  for (size_t t = 0; t < signature.tensors.size(); ++t) {
    const int64_t rows = signature.tensors[t].shape[0];
    const int64_t row_bytes = bytes_of_row(signature.tensors[t]);
    const char* next = request.memory_of(t).input;
    Scatter scatter{{}, request.memory_of(t).output, reduction_of(signature, t)};
    for (int64_t place = 0; place < size; ++place) {
      const uint64_t num_bytes = to_bytes(rows / size + (place < rows % size ? 1 : 0), row_bytes);
      if (collective_.team->contains(members.ranks[static_cast<size_t>(place)]))
        scatter.blocks.push_back({next, num_bytes});
      next += num_bytes;
    }
    group_.scatters.push_back(std::move(scatter));
  }
}

Status Executor::resume_adasum() {
  Status status = is_on_gpu_ ? gpu_.resume_adasum() : adasum_.resume(cpu_plane_);
  if (status.ok()) complete(collective_.tensors.front());
  return status;
}

Status Executor::resume_group() {
  const Signature& signature = collective_.first().signature();
  for (; group_.num_done < signature.tensors.size(); ++group_.num_done) {
    Status status;
    switch (signature.kind) {
      case HVL_ALLGATHER: status = plane()->allgather(group_.gathers[group_.num_done]); break;
      case HVL_REDUCESCATTER: status = plane()->reducescatter(group_.scatters[group_.num_done]); break;
      case HVL_ALLTOALL:
      case HVL_GATHER:
      case HVL_SCATTER: status = plane()->alltoall(group_.exchanges[group_.num_done]); break;
      case HVL_ALLREDUCE:
      case HVL_BROADCAST:
      case HVL_BARRIER:
      case HVL_JOIN:
      case HVL_ADD_PROCESS_SET:
      case HVL_REMOVE_PROCESS_SET:
      case HVL_REDUCE: __builtin_unreachable();  // resume() sends them in another way
    }
    if (!status.ok()) return status;
  }
  complete(collective_.tensors.front(), std::move(outputs_));
  outputs_.clear();
  return Status();
}

Status Executor::complete_with(NamedTensor* tensor, int64_t number) {
  char* data = nullptr;
  Status status = allocate(*tensor->request, 0, TensorSignature{HVL_INT64, {1}}, 1, &data);
  if (!status.ok()) return status;
  memcpy(data, &number, sizeof number);
  complete(tensor, std::move(outputs_));
  outputs_.clear();
  return Status();
}

void Executor::complete(NamedTensor* tensor, std::vector<hvl_output> outputs) {
  Status status;
  GpuResultPtr on_gpu;
  if (tensor->request->gpu != nullptr) on_gpu = gpu_.result_of(*tensor->request, &status);
  requests_.complete(tensor, std::move(status), std::move(outputs), std::move(on_gpu));
}

void Executor::end() {
  is_running_ = false;
  for (hvl_output& output : outputs_) context_.holds_memory() ? leak(output.data) : free(output.data);
  outputs_.clear();
}

}  // namespace hvl
