#include "transport/nccl/nccl_data_plane.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/keep.h"
#include "base/log.h"
#include "negotiate/rank_list.h"

namespace hvl {

namespace {

constexpr uint64_t kPollInterval = 50 * kMicrosecond;

// Asks again and again, as long as a rank that leaves waits at most; whether it was true at last.
bool poll_until(const std::function<bool()>& condition) {
  const uint64_t deadline = now_ns() + kLeaveTimeout;
  while (!condition()) {
    if (now_ns() >= deadline) return false;
    const timespec pause{0, static_cast<long>(kPollInterval)};
    nanosleep(&pause, nullptr);
  }
  return true;
}

template <typename Blocks>
bool have_one_length(const Blocks& blocks) {
  return std::all_of(blocks.begin(), blocks.end(),
                     [&](const auto& block) { return block.num_bytes == blocks[0].num_bytes; });
}

}  // namespace

NcclDataPlane::NcclDataPlane(const GpuOptions& options, std::shared_ptr<Gpu> gpu, DataPlane* cpu, Waiter* waiter,
                             int local_rank)
    : options_(options), gpu_(std::move(gpu)), cpu_(cpu), waiter_(waiter), local_rank_(local_rank) {}

Status NcclDataPlane::open() {
  Status status = gpu_->make_stream(&stream_);
  if (!status.ok()) return broken(status);
  staging_ = std::make_unique<Staging>(gpu_, stream_, options_.staging_bytes, cpu_, waiter_);
  if (options_.operations == GpuOperations::kStaging) return Status();
  NcclApi nccl{};
  status = NcclApi::load(options_.nccl_library, &nccl);
  if (status.ok()) nccl_ = nccl;
  why_no_nccl_ = status.message();
  return Status();
}

// The stream is idle, or what it still does outlives this: then what it copies from stays, too.
NcclDataPlane::~NcclDataPlane() {
  if (stream_ == nullptr) return;
  {
    const Gpu::Current current(*gpu_);
    retired_.clear();
    all_members_.clear();
  }
  if (drain()) {
    in_flight_.clear();
    gpu_->destroy_stream(stream_);
  } else {
    keep_forever(new std::deque<InFlight>(std::move(in_flight_)));
    keep_forever(new std::shared_ptr<PinnedMemory>(staging_->memory()));
  }
}

void NcclDataPlane::begin(TeamPtr team, uint64_t number) {
  team_ = std::move(team);
  cpu_->begin(team_, number);
  members_ = nullptr;
  stage_ = Stage::kAgree;
  result_ = nullptr;
  if (!team_->is_whole) return;
  std::unique_ptr<Members>& members = all_members_[team_.get()];
  if (members == nullptr) members = std::make_unique<Members>();
  members->team = team_;
  members_ = members.get();
}

Status NcclDataPlane::hold_until_ready(const GpuRequest& request) {
  if (request.ready == last_ready_) return Status();
  last_ready_ = request.ready;
  return broken(request.ready->hold_up(stream_));
}

Status NcclDataPlane::hold_until_now(const GpuRequest& request) {
  GpuEventPtr now;
  Status status = gpu_->record_callers(request.stream, &now);
  return broken(status.ok() ? now->hold_up(stream_) : status);
}

// One collective: `start` is called once, and tells NCCL or the staging what there is to do.
Status NcclDataPlane::run(const std::function<Status()>& start) {
  const Gpu::Current current(*gpu_);
  Status status = current.status();
  if (status.ok() && stage_ == Stage::kAgree) {
    status = agree();
    if (status.ok()) stage_ = Stage::kStart;
  }
  if (status.ok() && stage_ == Stage::kStart) {
    has_launched_ = false;
    status = start();
    if (status.ok()) stage_ = Stage::kSettle;
  }
  if (status.ok() && stage_ == Stage::kSettle) {
    if (has_launched_) status = settle(members_->communicator.get());
    if (status.ok()) stage_ = Stage::kStaged;
  }
  if (status.ok()) status = staging_->go_on();
  if (status.ok()) status = note_result();
  if (status.code() != HVL_IN_PROGRESS) stage_ = Stage::kAgree;
  return broken(status);
}

// Before the members of a process set do something together for the first time.
Status NcclDataPlane::agree() {
  if (members_ == nullptr || members_->state == Members::State::kReady) return Status();
  Status status;
  if (members_->state == Members::State::kNew) introduce(members_);
  if (members_->state == Members::State::kIntroducing) {
    status = cpu_->allgather(members_->exchange);
    if (status.ok()) status = choose(members_);
  }
  if (status.ok() && members_->state == Members::State::kConnecting) {
    status = settle(members_->communicator.get());
    if (status.ok()) members_->state = Members::State::kReady;
  }
  return status;
}

void NcclDataPlane::introduce(Members* members) {
  Introduction mine{};
  mine.gpu = gpu_->uuid();
  mine.operations = static_cast<int32_t>(options_.operations);
  std::string why_not = why_no_nccl_;
  if (nccl_.has_value() && team_->mine == 0) {
    const NcclResult result = nccl_->ncclGetUniqueId(&mine.id);
    if (result != kNcclSuccess) why_not = nccl_->describe(result, nullptr);
  }
  if (nccl_.has_value() && why_not.empty()) mine.nccl_version = nccl_->version();
  memcpy(mine.why_no_nccl, why_not.data(), std::min(why_not.size(), sizeof mine.why_no_nccl));
  members->introductions.assign(1 + team_->size(), Introduction());
  members->introductions[0] = mine;
  char* next = reinterpret_cast<char*>(members->introductions.data());
  members->exchange = Gather{next, {}};
  for (size_t place = 0; place < team_->size(); ++place) {
    members->exchange.blocks.push_back({next += sizeof(Introduction), sizeof(Introduction)});
  }
  members->state = Members::State::kIntroducing;
}

Status NcclDataPlane::choose(Members* members) {
  const std::vector<Introduction> introductions(members->introductions.begin() + 1, members->introductions.end());
  const TransportChoice choice = choose_transport(introductions, team_->ranks);
  if (!choice.uses_nccl) {
    if (options_.operations == GpuOperations::kNccl) {
      return Status(HVL_JOB_BROKEN, "HOROVODLIKE_GPU_OPERATIONS=nccl cannot be followed: " + choice.reason);
    }
    const LogLevel level = options_.operations == GpuOperations::kStaging ? LogLevel::kDebug : LogLevel::kWarning;
    if (team_->mine == 0) log(level, "tensors on GPUs go through the memory of the host: " + choice.reason);
    members->state = Members::State::kReady;
    return Status();
  }
  members->communicator = std::make_unique<NcclCommunicator>(*nccl_, stream_);
  members->state = Members::State::kConnecting;
  return members->communicator->start(introductions[0].id, static_cast<int>(team_->size()),
                                      static_cast<int>(team_->mine));
}

// Until NCCL has given to the device what it was called for, for which it may need the other members.
Status NcclDataPlane::settle(NcclCommunicator* communicator) {
  Status failure;
  const auto is_over = [&] {
    bool done = false;
    if (failure.ok()) failure = communicator->poll(&done);
    return done || !failure.ok();
  };
  Status status = waiter_->wait_polling(is_over, [this] { return others(); });
  return failure.ok() ? status : failure;
}

std::string NcclDataPlane::others() const {
  std::vector<int> ranks = team_->ranks;
  ranks.erase(ranks.begin() + static_cast<std::ptrdiff_t>(team_->mine));
  if (ranks.empty()) return "NCCL";
  return (ranks.size() > 1 ? "one of " : "") + text_of_ranks(ranks);
}

Status NcclDataPlane::note_result() {
  GpuEventPtr done;
  Status status = gpu_->record(stream_, &done);
  if (!status.ok()) return status;
  result_ = std::make_shared<GpuResult>(std::move(done));
  in_flight_.push_back({result_, staging_->memory()});
  return status;
}

Status NcclDataPlane::launch(const std::vector<Reduction>& reductions,
                             const std::function<void(NcclCommunicator*)>& calls) {
  has_launched_ = true;
  NcclCommunicator* communicator = members_->communicator.get();
  return communicator->launch(reductions, [&] { calls(communicator); });
}

Status NcclDataPlane::allreduce(const Batch& batch, const FinalBytes& final_bytes) {
  Status status = run([&] { return start_allreduce(batch); });
  if (status.ok()) final_bytes(batch.num_bytes());
  return status;
}

Status NcclDataPlane::start_allreduce(const Batch& batch) {
  std::vector<const Segment*> reduced;  // by NCCL
  std::vector<Reduction> reductions;
  staged_.clear();
  batch.for_each_piece(0, batch.num_bytes(), [&](const Segment& segment, uint64_t, uint64_t, uint64_t) {
    if (uses_nccl() && plan_reduction(segment.reduction, team_->size()).why_not == nullptr) {
      reduced.push_back(&segment);
      reductions.push_back(segment.reduction);
    } else {
      staged_.add(segment.input, segment.output, segment.num_bytes, segment.reduction);
    }
  });
  Status status;
  if (!reduced.empty()) {
    status = launch(reductions, [&](NcclCommunicator* nccl) {
      for (const Segment* segment : reduced) {
        nccl->all_reduce(segment->input, segment->output, segment->num_bytes, segment->reduction);
      }
    });
  }
  return status.ok() && !staged_.segments().empty() ? staging_->allreduce(staged_) : status;
}

Status NcclDataPlane::broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) {
  Status status = run([&] {
    const bool is_root = root == static_cast<int>(team_->mine);
    if (!uses_nccl()) return staging_->broadcast(batch, root, is_root);
    return launch({}, [&](NcclCommunicator* nccl) {
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
    return launch({}, [&](NcclCommunicator* nccl) {
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
    const bool has = uses_nccl() && plan_reduction(scatter.reduction, team_->size()).why_not == nullptr;
    if (!has) return staging_->reducescatter(scatter, team_->mine);
    return launch({scatter.reduction}, [&](NcclCommunicator* nccl) {
      const std::vector<Block<const char>>& blocks = scatter.blocks;
      if (have_one_length(blocks)) {
        if (blocks[0].num_bytes == 0) return;
        nccl->reduce_scatter(blocks[0].data, scatter.output, blocks[0].num_bytes, scatter.reduction);
        return;
      }
      for (size_t place = 0; place < blocks.size(); ++place) {
        if (blocks[place].num_bytes == 0) continue;
        char* to = place == team_->mine ? scatter.output : nullptr;
        nccl->reduce(blocks[place].data, to, blocks[place].num_bytes, scatter.reduction, static_cast<int>(place));
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
      status = gpu_->copy_on_device(own.data, exchange.received[mine].data, own.num_bytes, stream_);
    }
    if (!status.ok()) return status;
    return launch({}, [&](NcclCommunicator* nccl) {
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
  return broken(staging_->whole(batch, host, std::move(work)));
}

Status NcclDataPlane::on_host() {
  return run([] { return Status(); });
}

Status NcclDataPlane::check() {
  const Gpu::Current current(*gpu_);
  Status status = current.status();
  bool done = true;
  while (status.ok() && done && !in_flight_.empty()) {
    status = in_flight_.front().result->done().query(&done);
    if (status.ok() && done) in_flight_.pop_front();
  }
  if (in_flight_.empty()) {
    const auto is_finished = [](const auto& communicator) { return communicator->finish(); };
    retired_.erase(std::remove_if(retired_.begin(), retired_.end(), is_finished), retired_.end());
    return broken(status);
  }
  for (const auto& [team, members] : all_members_) {
    if (status.ok() && members->communicator != nullptr) status = members->communicator->poll(&done);
  }
  return broken(status);
}

void NcclDataPlane::forget(const TeamPtr& team) {
  const auto found = all_members_.find(team.get());
  if (found == all_members_.end()) return;
  if (found->second->communicator != nullptr) retired_.push_back(std::move(found->second->communicator));
  all_members_.erase(found);
  members_ = nullptr;
}

// Whether the stream has got to its end within some time.
bool NcclDataPlane::drain() {
  const Gpu::Current current(*gpu_);
  GpuEventPtr end;
  if (!current.status().ok() || !gpu_->record(stream_, &end).ok())
    return true;  // a device that has failed does nothing
  return poll_until([&] {
    bool done = false;
    return !end->query(&done).ok() || done;
  });
}

void NcclDataPlane::close() {
  if (!drain()) {
    return abort(Status(HVL_SHUT_DOWN, "the job was shut down while the GPU was busy with a collective"));
  }
  const Gpu::Current current(*gpu_);
  in_flight_.clear();
  for (auto& [team, members] : all_members_) {
    if (members->communicator != nullptr) retired_.push_back(std::move(members->communicator));
  }
  all_members_.clear();
  members_ = nullptr;
  poll_until([&] {
    const auto is_finished = [](const auto& communicator) { return communicator->finish(); };
    retired_.erase(std::remove_if(retired_.begin(), retired_.end(), is_finished), retired_.end());
    return retired_.empty();
  });
  retired_.clear();  // those that are left are aborted
}

void NcclDataPlane::abort(const Status& why) {
  const Gpu::Current current(*gpu_);
  for (const InFlight& each : in_flight_) {  // before the device can go on
    bool done = false;
    if (!each.result->done().query(&done).ok() || !done) each.result->fail(why);
  }
  for (auto& [team, members] : all_members_) {
    if (members->communicator != nullptr) members->communicator->abort();
  }
  retired_.clear();
  all_members_.clear();
  members_ = nullptr;
  // What was under way may still write to its tensors.
  if (drain()) {
    in_flight_.clear();
  } else {
    log(LogLevel::kWarning, "the GPU does not get on with what it was given before the job broke");
  }
}

// An error of the device or of NCCL breaks the job, and says whose it is.
Status NcclDataPlane::broken(const Status& status) const {
  if (status.ok() || status.code() == HVL_IN_PROGRESS || status.code() == HVL_JOB_BROKEN) return status;
  return Status(HVL_JOB_BROKEN,
                waiter_->describe(local_rank_) + ", GPU " + std::to_string(gpu_->device()) + ": " + status.message());
}

}  // namespace hvl
