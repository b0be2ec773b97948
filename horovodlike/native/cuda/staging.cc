#include "cuda/staging.h"

#include <algorithm>
#include <string>
#include <utility>

namespace hvl {

namespace {

// No thread waits for a part of a result.
constexpr auto kNobody = [](uint64_t) {};

// The bytes of one member's block that one step moves.
struct Cut {
  uint64_t offset;
  uint64_t num_bytes;
};

template <typename Blocks>
std::vector<Cut> cuts_of(const Blocks& blocks, uint64_t offset, uint64_t step) {
  std::vector<Cut> cuts;
  for (const auto& block : blocks) {
    const uint64_t begin = std::min(offset, block.num_bytes);
    cuts.push_back({begin, std::min(step, block.num_bytes - begin)});
  }
  return cuts;
}

template <typename Blocks>
uint64_t longest_of(const Blocks& blocks) {
  uint64_t longest = 0;
  for (const auto& block : blocks) longest = std::max(longest, block.num_bytes);
  return longest;
}

}  // namespace

Status Staging::begin(uint64_t bytes_of_half, uint64_t num_halves) {
  steps_.clear();
  num_begun_ = 0;
  num_done_ = 0;
  const uint64_t num_bytes = num_halves * bytes_of_half;
  if (memory_ != nullptr && memory_->num_bytes() >= num_bytes) return Status();
  return gpu_->allocate_pinned(2 * align(std::max((num_bytes + 1) / 2, kAlignment)), &memory_);
}

// Makes the steps for a batch: each moves as many bytes of its stream as a half holds.
Status Staging::in_steps(const Batch& batch, bool copies_in, const std::function<bool(const Segment&)>& copies_out,
                         const std::function<Status(DataPlane*, const Batch&)>& work) {
  Status status = begin(std::min(bytes_, batch.num_bytes()));
  for (uint64_t at = 0; status.ok() && at < batch.num_bytes(); at += bytes_) {
    Step step;
    const auto host = std::make_shared<Batch>();
    char* half = half_of(steps_.size());
    batch.for_each_piece(at, std::min(at + bytes_, batch.num_bytes()),
                         [&](const Segment& segment, uint64_t from, uint64_t place, uint64_t num_bytes) {
                           if (copies_in) step.in.push_back({segment.input + from, half + place, num_bytes});
                           if (copies_out(segment)) {
                             step.out.push_back({half + place, segment.output + from, num_bytes});
                           }
                           host->add(half + place, half + place, num_bytes, segment.reduction);
                         });
    step.work = [host, work](DataPlane* cpu) { return work(cpu, *host); };
    steps_.push_back(std::move(step));
  }
  return status;
}

Status Staging::allreduce(const Batch& batch) {
  return in_steps(
      batch, true, [](const Segment&) { return true; },
      [](DataPlane* cpu, const Batch& host) { return cpu->allreduce(host, kNobody); });
}

Status Staging::reduce_to(const Batch& batch, int root, bool is_root) {
  return in_steps(
      batch, true, [is_root](const Segment&) { return is_root; },
      [root](DataPlane* cpu, const Batch& host) { return cpu->reduce_to(host, root, kNobody); });
}

Status Staging::broadcast(const Batch& batch, int root, bool is_root) {
  const auto is_missing = [is_root](const Segment& segment) { return !is_root || segment.input != segment.output; };
  return in_steps(batch, is_root, is_missing,
                  [root](DataPlane* cpu, const Batch& host) { return cpu->broadcast(host, root, kNobody); });
}

Status Staging::allgather(const Gather& gather, size_t mine) {
  const uint64_t longest = longest_of(gather.blocks);
  const uint64_t length = share_of_each(bytes_, gather.blocks.size() + 1, longest);
  Status status = begin(length * (gather.blocks.size() + 1));
  for (uint64_t offset = 0; status.ok() && offset < longest; offset += length) {
    const std::vector<Cut> cuts = cuts_of(gather.blocks, offset, length);
    Step step;
    char* next = half_of(steps_.size());
    const auto host = std::make_shared<Gather>();
    host->input = next;
    step.in.push_back({gather.input + cuts[mine].offset, next, cuts[mine].num_bytes});
    next += length;
    for (size_t member = 0; member < cuts.size(); ++member) {
      host->blocks.push_back({next, cuts[member].num_bytes});
      step.out.push_back({next, gather.blocks[member].data + cuts[member].offset, cuts[member].num_bytes});
      next += cuts[member].num_bytes;
    }
    step.work = [host](DataPlane* cpu) { return cpu->allgather(*host); };
    steps_.push_back(std::move(step));
  }
  return status;
}

Status Staging::reducescatter(const Scatter& scatter, size_t mine) {
  const uint64_t longest = longest_of(scatter.blocks);
  const uint64_t length = share_of_each(bytes_, scatter.blocks.size() + 1, longest);
  Status status = begin(length * (scatter.blocks.size() + 1));
  for (uint64_t offset = 0; status.ok() && offset < longest; offset += length) {
    const std::vector<Cut> cuts = cuts_of(scatter.blocks, offset, length);
    Step step;
    char* next = half_of(steps_.size());
    const auto host = std::make_shared<Scatter>();
    host->reduction = scatter.reduction;
    host->output = next;
    step.out.push_back({next, scatter.output + cuts[mine].offset, cuts[mine].num_bytes});
    next += length;
    for (size_t member = 0; member < cuts.size(); ++member) {
      host->blocks.push_back({next, cuts[member].num_bytes});
      step.in.push_back({scatter.blocks[member].data + cuts[member].offset, next, cuts[member].num_bytes});
      next += cuts[member].num_bytes;
    }
    step.work = [host](DataPlane* cpu) { return cpu->reducescatter(*host); };
    steps_.push_back(std::move(step));
  }
  return status;
}

Status Staging::alltoall(const Exchange& exchange) {
  const uint64_t length = share_of_each(bytes_, 2 * exchange.sent.size(), exchange.longest);
  Status status = begin(length * 2 * exchange.sent.size());
  for (uint64_t offset = 0; status.ok() && offset < exchange.longest; offset += length) {
    const std::vector<Cut> sent = cuts_of(exchange.sent, offset, length);
    const std::vector<Cut> received = cuts_of(exchange.received, offset, length);
    Step step;
    char* next = half_of(steps_.size());
    const auto host = std::make_shared<Exchange>();
    host->longest = std::min(length, exchange.longest - offset);
    for (size_t member = 0; member < sent.size(); ++member) {
      host->sent.push_back({next, sent[member].num_bytes});
      step.in.push_back({exchange.sent[member].data + sent[member].offset, next, sent[member].num_bytes});
      next += length;
      host->received.push_back({next, received[member].num_bytes});
      step.out.push_back({next, exchange.received[member].data + received[member].offset, received[member].num_bytes});
      next += length;
    }
    step.work = [host](DataPlane* cpu) { return cpu->alltoall(*host); };
    steps_.push_back(std::move(step));
  }
  return status;
}

Status Staging::whole(const Batch& batch, Batch* host, std::function<Status(DataPlane*)> work) {
  Status status = begin(batch.num_bytes(), 1);
  if (!status.ok()) return status;
  Step step;
  char* half = half_of(0);
  host->clear();
  batch.for_each_piece(0, batch.num_bytes(), [&](const Segment& segment, uint64_t, uint64_t place, uint64_t num_bytes) {
    step.in.push_back({segment.input, half + place, num_bytes});
    step.out.push_back({half + place, segment.output, num_bytes});
    host->add(half + place, half + place, num_bytes, segment.reduction);
  });
  step.work = std::move(work);
  steps_.push_back(std::move(step));
  return status;
}

void Staging::let_go_of_whole() {
  if (memory_->num_bytes() > 2 * bytes_) memory_ = nullptr;
}

Status Staging::copy_in(size_t step) {
  Status status;
  for (const Copy& copy : steps_[step].in) {
    if (status.ok() && copy.num_bytes > 0) status = gpu_->copy_to_host(copy.from, copy.to, copy.num_bytes, stream_);
  }
  // Also if there is nothing to copy: the host may write to the half only when its old contents are on the device.
  return status.ok() ? gpu_->record(stream_, &copied_[step % 2]) : status;
}

Status Staging::copy_out(size_t step) {
  Status status;
  for (const Copy& copy : steps_[step].out) {
    if (status.ok() && copy.num_bytes > 0) status = gpu_->copy_to_device(copy.from, copy.to, copy.num_bytes, stream_);
  }
  return status;
}

Status Staging::wait_for_copy(size_t step) {
  Status failure;
  const auto is_over = [&] {
    bool done = false;
    if (failure.ok()) failure = copied_[step % 2]->query(&done);
    return done || !failure.ok();
  };
  Status status = waiter_->wait_for_device(is_over, [this] {
    return Stall{who_, "a copy to the host", "it is not done with what its streams were given before"};
  });
  return failure.ok() ? status : failure;
}

Status Staging::resume() {
  Status status;
  while (status.ok() && num_done_ < steps_.size()) {
    if (num_begun_ == num_done_) status = copy_in(num_begun_++);
    if (status.ok()) status = wait_for_copy(num_done_);
    // The device copies the next half while the ranks work on this one.
    if (status.ok() && num_begun_ == num_done_ + 1 && num_begun_ < steps_.size()) status = copy_in(num_begun_++);
    if (status.ok()) status = steps_[num_done_].work(cpu_);
    if (status.ok()) status = copy_out(num_done_++);
  }
  if (status.code() != HVL_IN_PROGRESS) steps_.clear();
  return status;
}

}  // namespace hvl
