// The coordinator: rank 0's part of the negotiation. It counts the ranks that have each tensor ready and decides what
// all ranks do next.
//
// Pure: no clock, no thread, no I/O. Its input is the order in which messages arrived; its output is the log.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "negotiate/message.h"
#include "negotiate/routes.h"
#include "negotiate/straggler_stats.h"

namespace hvl {

// The defaults are the same as in config.py, which a job always overrides.
struct CoordinatorOptions {
  int size = 1;
  int64_t fusion_threshold = 128 << 20;  // bytes of a batch at most; 0: every tensor on its own
  int cache_capacity = 8192;             // ids defined at a time (more only while they are all in use)
  int max_batch = 4096;                  // ids of a batch at most
  Routes routes{};                       // tensors with different transports are in different batches
};

// The reason for a record. Kept as numbers, because most reasons are never turned into text.
struct Reason {
  enum class Why : uint8_t { kAllReady, kNew, kChanged, kRefused, kCacheFull, kSetRemoved, kRankLeft };
  Why why = Why::kAllReady;
  // Tensors (kAllReady, kNew, kChanged, kSetRemoved), ids defined (kCacheFull), ranks (kRefused, kRankLeft).
  int32_t count = 0;
  int64_t bytes = 0;

  std::string text() const;  // e.g. "3 tensors, 12288 bytes, all ranks ready"
};

// One log record, its reason, and the ranks that it concerns. All ranks read it; only the ranks in `concerned` act on
// it.
struct Decision {
  Record record;
  Reason reason;
  std::vector<int> concerned;  // ranks, ascending; empty: all
};

// The id of the next process set: the lowest free one. `process_sets`: a map from the ids in use.
template <typename Map>
int32_t next_process_set(const Map& process_sets) {
  int32_t id = 0;
  while (process_sets.count(id) > 0) ++id;
  return id;
}

// A tensor that some ranks have ready and others not.
struct Pending {
  std::string name;
  Kind kind;
  std::vector<int> ready;
  std::vector<int> missing;
  uint64_t since;  // when the first rank had it ready
  int32_t process_set = 0;
  std::vector<int> members = {};  // the process set's members
};

class Coordinator {
 public:
  explicit Coordinator(const CoordinatorOptions& options);
  ~Coordinator();

  // `sent`: the time of sending, in nanoseconds of the host's clock; messages of different ranks may arrive in another
  // order. Only pending() and straggler_stats() use it. An invalid message is an error, and the job is broken.
  Status on_message(int rank, const Message& message, uint64_t sent);
  // The same for all the ranks that the message names, as if each of them had sent it. `came`: its time of arrival, by
  // the host's clock. Announcements by id cost the same for any number of consecutive ranks.
  Status on_message(const Message& message, uint64_t came);
  // The hot path of on_message for Type::kReady.
  Status on_ready(int rank, TensorId id, uint64_t sent);

  // Appends the decisions since the last call, in log order.
  void decide(std::vector<Decision>* decisions);

  void set_fusion_threshold(int64_t num_bytes);

  // The tensors that have been waited for since `latest` or longer, oldest first.
  std::vector<Pending> pending(uint64_t latest = UINT64_MAX) const;
  // Indexed by rank.
  const std::vector<StragglerStats>& straggler_stats() const;
  // Requests that came with a full signature, from all ranks together.
  uint64_t negotiated_in_full() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The verdict on tensors that some ranks have ready and others not.
struct StallVerdict {
  std::string warning;       // empty: nothing new to say
  bool shut_down = false;    // the job must end, with `warning` as the reason
  std::vector<int> missing;  // ranks, ascending
};

class StallInspector {
 public:
  // Seconds; 0 turns the warning off, or means that a stalled job is never ended.
  StallInspector(double warning_time, double shutdown_time);

  // `now`: nanoseconds, by the clock of Pending::since. A stall is reported again when it changes, else in one line, at
  // growing intervals.
  StallVerdict inspect(const std::vector<Pending>& pending, uint64_t now);
  // A tensor that became ready on its first rank after this time is not stalled yet.
  uint64_t latest_stall(uint64_t now) const;
  // True if a tensor has been waited for so long that the job must end.
  bool is_over(const std::vector<Pending>& pending, uint64_t now) const;

 private:
  bool ends_job(const Pending& tensor, uint64_t now) const;

  uint64_t warning_time_;
  uint64_t shutdown_time_;
  uint64_t last_warning_ = 0;
  uint64_t interval_ = 0;  // time until the next warning of the stall that was last reported
  std::string reported_;
};

}  // namespace hvl
