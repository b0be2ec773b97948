#include "nccl/nccl_data_plane.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/memory.h"

namespace hvl {

namespace {

template <typename Blocks>
bool have_one_length(const Blocks& blocks) {
  return std::all_of(blocks.begin(), blocks.end(),
                     [&](const auto& block) { return block.num_bytes == blocks[0].num_bytes; });
}

}  // namespace

NcclDataPlane::NcclDataPlane(const GpuOptions& options, std::shared_ptr<Gpu> gpu, DataPlane* cpu, Waiter* waiter,
                             int local_rank, int size)
    : options_(options),
      gpu_(std::move(gpu)),
      cpu_(cpu),
      waiter_(waiter),
      stream_(waiter->describe(local_rank) + ", GPU " + std::to_string(gpu_->device()), gpu_, waiter),
      teams_(NcclContext{options.operations, gpu_, cpu, waiter, size}) {}

// The stream is idle, or its work outlives this object: then the memory that the work copies from is leaked, too.
NcclDataPlane::~NcclDataPlane() {
  const bool has_ended = teams_.abort() && stream_.drain();
  stream_.close(has_ended);
  if (!has_ended) leak(new std::shared_ptr<PinnedMemory>(staging_->memory()));
}

Status NcclDataPlane::open(NameOf name_of) {
  name_of_ = std::move(name_of);
  Status status = stream_.open();
  if (!status.ok()) return status;
  staging_ = std::make_unique<Staging>(stream_.who(), gpu_, stream_.get(), options_.staging_bytes, cpu_, waiter_);
  teams_.open(options_.nccl_library, stream_.get());
  return status;
}

void NcclDataPlane::begin(TeamPtr team, uint64_t number) {
  team_ = std::move(team);
  cpu_->begin(team_, number);
  stage_ = Stage::kAgree;
  is_staged_ = false;
  stream_.begin();
  teams_.begin(team_, allows_nccl_);
}

// Runs one collective: `start` is called once, and gives the work to NCCL or the staging.
Status NcclDataPlane::run(const std::function<Status()>& start) {
  const Gpu::Current current(*gpu_);
  Status status = current.status();
  if (status.ok() && stage_ == Stage::kAgree) {
    status = teams_.agreement().agree();
    if (status.ok()) stage_ = Stage::kStart;
  }
  if (status.ok() && stage_ == Stage::kStart) {
    if (!team_->is_whole && allows_nccl_ && teams_.use_nccl()) warn_staged("some ranks of its process set have joined");
    status = start();
    if (status.ok()) stage_ = Stage::kSettle;
  }
  if (status.ok() && stage_ == Stage::kSettle) {
    status = teams_.agreement().settle();
    if (status.ok()) stage_ = Stage::kStaged;
  }
  if (status.ok()) status = staging_->resume();
  if (status.ok()) status = stream_.end(staging_->memory());
  if (status.code() != HVL_IN_PROGRESS) stage_ = Stage::kAgree;
  return stream_.broken(status);
}

// Also warns if NCCL cannot run this reduction although the members use NCCL.
NcclReduction NcclDataPlane::plan_for(const Reduction& reduction, const char* input) {
  const NcclReduction plan = plan_reduction(reduction, team_->size());
  if (uses_nccl() && plan.why_not != nullptr) warn_staged(plan.why_not, input);
  return plan;
}

// Warns once for each reason. `input`: the tensor's input; null: the warning names the collective's first tensor.
void NcclDataPlane::warn_staged(const char* why, const char* input) {
  if (team_->mine != 0 || !staged_for_.insert(why).second) return;
  log(LogLevel::kWarning, "'" + name_of_(input) + "' and its like go through the memory of the host: " + why);
}

Status NcclDataPlane::allreduce(const Batch& batch, const FinalBytes& final_bytes) {
  Status status = run([&] {
    Status started = start_reduction(batch, [](auto* nccl, const Segment& segment, uint64_t count, const auto& plan) {
      nccl->all_reduce(segment.input, segment.output, count, plan);
    });
    return started.ok() && !staged_.segments().empty() ? staging_->allreduce(staged_) : started;
  });
  if (status.ok()) final_bytes(batch.num_bytes());
  return status;
}

Status NcclDataPlane::reduce_to(const Batch& batch, int root, const FinalBytes& final_bytes) {
  Status status = run([&] {
    const bool is_root = root == static_cast<int>(team_->mine);
    Status started = start_reduction(batch, [&](auto* nccl, const Segment& segment, uint64_t count, const auto& plan) {
      nccl->reduce(segment.input, is_root ? segment.output : nullptr, count, plan, root);
    });
    return started.ok() && !staged_.segments().empty() ? staging_->reduce_to(staged_, root, is_root) : started;
  });
  if (status.ok()) final_bytes(batch.num_bytes());
  return status;
}

Status NcclDataPlane::start_reduction(const Batch& batch, const Reduce& reduce) {
  std::vector<const Segment*> reduced;  // by NCCL
  std::vector<NcclReduction> reductions;
  staged_.clear();
  batch.for_each_piece(0, batch.num_bytes(), [&](const Segment& segment, uint64_t, uint64_t, uint64_t) {
    const NcclReduction plan = plan_for(segment.reduction, segment.input);
    if (uses_nccl() && plan.why_not == nullptr) {
      reduced.push_back(&segment);
      reductions.push_back(plan);
    } else {
      staged_.add(segment.input, segment.output, segment.num_bytes, segment.reduction);
    }
  });
  is_staged_ = !staged_.segments().empty();
  if (reduced.empty()) return Status();
  return teams_.agreement().launch(reductions, [&](NcclCommunicator* nccl) {
    for (size_t i = 0; i < reduced.size(); ++i) {
      const Segment& segment = *reduced[i];
      reduce(nccl, segment, segment.num_bytes / size_of(segment.reduction.dtype), reductions[i]);
    }
  });
}

Status NcclDataPlane::broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) {
  Status status = run([&] {
    const bool is_root = root == static_cast<int>(team_->mine);
    if (!uses_nccl()) return staging_->broadcast(batch, root, is_root);
    return teams_.agreement().launch({}, [&](NcclCommunicator* nccl) {
      for (const Segment& segment : batch.segments()) {
        if (segment.num_bytes == 0) continue;
        nccl->broadcast(is_root ? segment.input : segment.output, segment.output, segment.num_bytes, root);
      }
    });
  });
  if (status.ok()) final_bytes(batch.num_bytes());
  return status;
}

Status NcclDataPlane::allgather(const Gather& gather) {
  return run([&] {
    if (!uses_nccl()) return staging_->allgather(gather, team_->mine);
    return teams_.agreement().launch({}, [&](NcclCommunicator* nccl) {
      const std::vector<Block<char>>& blocks = gather.blocks;
      if (have_one_length(blocks)) {
        if (blocks[0].num_bytes > 0) nccl->all_gather(gather.input, blocks[0].data, blocks[0].num_bytes);
        return;
      }
      for (size_t place = 0; place < blocks.size(); ++place) {
        if (blocks[place].num_bytes == 0) continue;
        const char* from = place == team_->mine ? gather.input : blocks[place].data;
        nccl->broadcast(from, blocks[place].data, blocks[place].num_bytes, static_cast<int>(place));
      }
    });
  });
}

Status NcclDataPlane::reducescatter(const Scatter& scatter) {
  return run([&] {
    const std::vector<Block<const char>>& blocks = scatter.blocks;
    const NcclReduction plan = plan_for(scatter.reduction, blocks[0].data);
    if (plan.why_not != nullptr) is_staged_ = true;
    if (!uses_nccl() || plan.why_not != nullptr) return staging_->reducescatter(scatter, team_->mine);
    return teams_.agreement().launch({plan}, [&](NcclCommunicator* nccl) {
      const size_t bytes_of_element = size_of(scatter.reduction.dtype);
      if (have_one_length(blocks)) {
        if (blocks[0].num_bytes == 0) return;
        nccl->reduce_scatter(blocks[0].data, scatter.output, blocks[0].num_bytes / bytes_of_element, plan);
        return;
      }
      for (size_t place = 0; place < blocks.size(); ++place) {
        if (blocks[place].num_bytes == 0) continue;
        char* to = place == team_->mine ? scatter.output : nullptr;
        nccl->reduce(blocks[place].data, to, blocks[place].num_bytes / bytes_of_element, plan, static_cast<int>(place));
      }
    });
  });
}

Status NcclDataPlane::alltoall(const Exchange& exchange) {
  return run([&] {
    if (!uses_nccl()) return staging_->alltoall(exchange);
    const size_t mine = team_->mine;
    const Block<const char>& own = exchange.sent[mine];
    Status status;
    if (own.num_bytes > 0) {
      status = gpu_->copy_on_device(own.data, exchange.received[mine].data, own.num_bytes, stream_.get());
    }
    if (!status.ok()) return status;
    return teams_.agreement().launch({}, [&](NcclCommunicator* nccl) {
      for (size_t place = 0; place < exchange.sent.size(); ++place) {
        if (place == mine) continue;
        const Block<const char>& sent = exchange.sent[place];
        const Block<char>& received = exchange.received[place];
        if (sent.num_bytes > 0) nccl->send(sent.data, sent.num_bytes, static_cast<int>(place));
        if (received.num_bytes > 0) nccl->receive(received.data, received.num_bytes, static_cast<int>(place));
      }
    });
  });
}

Status NcclDataPlane::prepare_on_host(const Batch& batch, Batch* host, std::function<Status(DataPlane*)> work) {
  return stream_.broken(staging_->whole(batch, host, std::move(work)));
}

Status NcclDataPlane::on_host() {
  const Status status = run([this] {
    if (uses_nccl()) warn_staged("NCCL has no Adasum");
    is_staged_ = true;
    return Status();
  });
  if (status.ok()) staging_->let_go_of_whole();  // the copies in flight own it
  return status;
}

Status NcclDataPlane::check() {
  const Gpu::Current current(*gpu_);
  Status status = current.status();
  if (status.ok()) status = stream_.check();
  if (status.ok() && !stream_.is_working()) teams_.finish_retired();
  if (status.ok() && stream_.is_working()) status = teams_.check();
  return stream_.broken(status.ok() ? stream_.check_stall() : status);
}

void NcclDataPlane::abort(const Status& why) {
  stream_.fail(why);  // before the device can continue
  // Until the device has ended, its work may still write to the tensors.
  stream_.let_go(teams_.abort() && stream_.drain());
}

}  // namespace hvl
