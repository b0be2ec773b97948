// The control plane of the ranks of one host, through ring buffers in shared memory. Local rank 0 holds the
// coordinator.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "control/coordinator_host.h"
#include "control/leader_rings.h"
#include "shm/host_memory.h"
#include "shm/ring_buffer.h"

namespace hvl {

class ShmCoordinator : public ControlPlane {
 public:
  // `pids` by local rank; empty: the ranks are threads of this process.
  ShmCoordinator(std::shared_ptr<HostMemory> memory, const CoordinatorHostOptions& options, std::vector<int> pids);

  Status send(const Message& message) override { return coordinator_host_.accept(0, message, now_ns()); }
  Status pump(bool* progressed) override;
  Status next(Record* record, bool* found) override {
    *found = rings_.next(record);
    return Status();
  }
  bool has_news() override { return coordinator_host_.has_messages() || rings_.has_next() || rings_.has_news(); }
  bool is_flushed() override { return rings_.is_flushed(); }
  Status check_stalls() override {
    return coordinator_host_.check_stalls(&questions_, 0, [this] { rings_.show_inquiry(); });
  }
  void set_fusion_threshold(int64_t num_bytes) override { coordinator_host_.set_fusion_threshold(num_bytes); }

 private:
  const std::vector<int> ranks_;  // global ranks by local rank: here both are the same
  CoordinatorHost coordinator_host_;
  StackDumpRequests questions_;
  LeaderRings rings_;
};

// The control plane of a host's ranks other than local rank 0.
class ShmWorker : public ControlPlane {
 public:
  ShmWorker(std::shared_ptr<HostMemory> memory, int local_rank);

  Status send(const Message& message) override {
    frame_.clear();
    put_time(&frame_);
    encode(message, &frame_);
    requests_.send(frame_);
    is_leaving_ |= message.type == Message::Type::kShutdown;
    return Status();
  }
  Status pump(bool* progressed) override {
    if (!requests_.pump()) return Status();
    *progressed = true;
    memory_->notify(0, is_leaving_ ? kWakeNews : kWakeReady);
    return Status();
  }
  Status next(Record* record, bool* found) override {
    bool freed = false;
    *found = log_.receive(&frame_, &freed);
    if (freed) memory_->notify(0, kWakeRoom);
    return *found ? decode(frame_.data(), frame_.size(), record) : Status();
  }
  bool has_news() override { return log_.has_frame() || requests_.can_pump(); }
  bool is_flushed() override { return requests_.is_flushed(); }
  Status check_stalls() override { return Status(); }

 private:
  std::shared_ptr<HostMemory> memory_;
  RingBufferWriter requests_;
  RingBufferReader log_;
  std::string frame_;
  bool is_leaving_ = false;  // this rank shuts down: it must wake even a coordinator with nothing in flight
};

}  // namespace hvl
