// A job whose ranks are engines of one process, for tests of the engine.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "connections.h"
#include "engine/engine.h"

namespace hvl {

constexpr uint64_t kPatience = 60 * kSecond;

// True for the reductions that brief tests leave out: sums of all types stay, and each other operation of some types.
inline bool is_left_out(int dtype, ReduceOp op) { return check::is_brief && op != HVL_SUM && (dtype + op) % 5 != 0; }

// A job whose ranks are engines of this process. Where `options.hosts` has several hosts, the ranks of each have memory
// of their own, and the hosts are connected.
class Job {
 public:
  // `local_pids`, if there are any, are those of each host's ranks; the first are enough of them.
  explicit Job(int size, EngineOptions options = EngineOptions(), int64_t slot_bytes = 4096, int slot_depth = 4,
               const Wiring& wiring = Wiring()) {
    const std::vector<int> pids = options.local_pids;
    options.size = size;
    if (options.hosts.empty()) options.hosts.assign(static_cast<size_t>(size), 0);
    connections_ = std::make_unique<Connections>(options, wiring);
    std::vector<std::shared_ptr<HostMemory>> memories;
    std::vector<int> num_ranks;  // by host
    for (int host : options.hosts) {
      if (host == static_cast<int>(num_ranks.size())) num_ranks.push_back(0);
      ++num_ranks[static_cast<size_t>(host)];
    }
    for (int ranks : num_ranks) memories.push_back(HostMemory::anonymous(HostShape{ranks, slot_bytes, slot_depth}));
    std::vector<int> next(num_ranks.size());
    for (int rank = 0; rank < size; ++rank) {
      const size_t host = static_cast<size_t>(options.hosts[static_cast<size_t>(rank)]);
      options.rank = rank;
      options.local_rank = next[host]++;
      options.local_pids.assign(pids.begin(), pids.begin() + std::min<int64_t>(num_ranks[host], pids.size()));
      if (num_ranks.size() > 1) {
        options.transport = connections_->transport_of(rank);
        options.wakeup_fd = connections_->wakeup_fd(rank);
        if (options.local_rank == 0)
          memories[host]->set_pipes(
              connections_->wakeup_fds_of(options.hosts, options.hosts[static_cast<size_t>(rank)]));
      }
      handles_.emplace_back();
      engines_.push_back(std::make_unique<Engine>(options, memories[host], &handles_.back()));
    }
  }

  // Engines leave together: each waits until the others have seen the end.
  ~Job() { shut_down(); }

  void shut_down() {
    on_all([&](int rank) { engines_[static_cast<size_t>(rank)]->shut_down(); });
  }

  int size() const { return static_cast<int>(engines_.size()); }
  HandleTable& handles(int rank) { return handles_[static_cast<size_t>(rank)]; }
  Engine& engine(int rank) { return *engines_[static_cast<size_t>(rank)]; }

  void on_all(const std::function<void(int)>& function) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back(function, rank);
    for (auto& thread : threads) thread.join();
  }

  int64_t enqueue(int rank, const std::shared_ptr<Operation>& operation, const std::vector<const char*>& inputs,
                  const std::vector<char*>& outputs, Status* status = nullptr) {
    auto request = std::make_unique<PendingRequest>();
    request->operation = operation;
    for (size_t t = 0; t < inputs.size(); ++t) {
      Memory memory{inputs[t], outputs.empty() ? nullptr : outputs[t]};
      if (t == 0) request->memory = memory;
      if (t > 0) request->more.push_back(memory);
    }
    int64_t handle = 0;
    Status result = engine(rank).enqueue(std::move(request), &handle);
    engine(rank).notify();
    if (status != nullptr) {
      *status = result;
    } else {
      CHECK_EQ(result.message(), "");
    }
    return handle;
  }

  // From now on wait() asks again and again, and waits that long at most each time.
  void become_impatient(uint64_t nanoseconds) { patience_ = nanoseconds; }

  // Shows a rank to others as if its process had ended: all of its connections are closed.
  void cut_off(int rank) { connections_->shut_down(rank); }

  Status wait(int rank, int64_t handle, std::vector<hvl_output>* outputs = nullptr) {
    std::vector<hvl_output> ignored;
    wait_only(rank, handle);
    return handles(rank).consume(handle, outputs != nullptr ? outputs : &ignored);
  }

  // Until it is complete; it stays as it is.
  void wait_only(int rank, int64_t handle) {
    const uint64_t deadline = now_ns() + kPatience;
    hvl_status waited = HVL_IN_PROGRESS;
    while (waited == HVL_IN_PROGRESS && now_ns() < deadline) {
      waited = engine(rank).wait(&handle, 1, std::min(deadline, now_ns() + patience_));
    }
    CHECK_EQ(static_cast<int>(waited), static_cast<int>(HVL_OK));
  }

  Status run(int rank, const std::shared_ptr<Operation>& operation, void* data) {
    return wait(rank, enqueue(rank, operation, {static_cast<char*>(data)}, {static_cast<char*>(data)}));
  }

 private:
  uint64_t patience_ = kPatience;
  std::unique_ptr<Connections> connections_;
  std::deque<HandleTable> handles_;  // of each rank, as in a process of its own
  std::vector<std::unique_ptr<Engine>> engines_;
};

inline std::shared_ptr<Operation> make(const std::string& name, Kind kind, const std::vector<Shape>& shapes,
                                       ReduceOp op = HVL_SUM, int root = -1) {
  auto operation = std::make_shared<Operation>();
  operation->signature.name = name;
  operation->signature.kind = kind;
  operation->signature.op = op;
  operation->signature.root = root;
  for (const Shape& shape : shapes) {
    TensorSignature tensor{HVL_FLOAT32, shape};
    operation->num_bytes.push_back(tensor.num_bytes());
    operation->total_bytes += tensor.num_bytes();
    operation->signature.tensors.push_back(tensor);
  }
  return operation;
}

constexpr size_t kPeriod = 97;

inline float value(int rank, size_t index) {
  return static_cast<float>((index * 31 + static_cast<size_t>(rank) * 7) % kPeriod);
}

}  // namespace hvl
