#include "control/shm_control.h"

#include <numeric>
#include <utility>

#include "shm/ring_buffer.h"

namespace hvl {

namespace {

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

ShmCoordinator::ShmCoordinator(std::shared_ptr<HostMemory> memory, const CoordinatorHostOptions& options,
                               std::vector<int> pids)
    : ranks_(all_ranks(memory->shape().ranks)),
      coordinator_host_(options),
      questions_(memory, std::move(pids), ranks_),
      rings_(std::move(memory)) {}

Status ShmCoordinator::pump(bool* progressed) {
  Status status = rings_.receive(
      [this](int rank, const Message& message, uint64_t sent) { return coordinator_host_.accept(rank, message, sent); },
      progressed);
  if (!status.ok()) return status;
  const bool has_heard = coordinator_host_.has_messages();
  coordinator_host_.decide(
      [this](Decision&& decision) { rings_.publish(std::move(decision.record), decision.concerned); });
  rings_.pump(progressed);
  if (has_heard) rings_.show(coordinator_host_.straggler_stats(), ranks_);
  return Status();
}

ShmWorker::ShmWorker(std::shared_ptr<HostMemory> memory, int local_rank)
    : memory_(std::move(memory)),
      requests_(memory_->request_ring(local_rank), kRequestRingBytes, &memory_->rank(local_rank).requests_written,
                {&memory_->rank(local_rank).requests_read}),
      log_(memory_->log_ring(), kLogRingBytes, &memory_->log_written(), &memory_->rank(local_rank).log_read) {}

}  // namespace hvl
