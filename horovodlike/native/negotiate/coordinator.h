// The coordinator: rank 0's part of the negotiation. It counts who has what ready and decides what all ranks do next.
//
// Pure: no clock, no thread, no I/O. Its input is the order in which messages arrived; its output is the log.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "negotiate/message.h"
#include "negotiate/straggler_stats.h"

namespace hvl {

struct CoordinatorOptions {
  int size = 1;
  int64_t fusion_threshold = 128 << 20;  // bytes of a batch at most; 0: every tensor on its own
  int cache_capacity = 1024;             // ids defined at a time (more only while they are all in use)
  int max_batch = 4096;                  // ids of a batch at most
};

// Why a record was made. Numbers, because most reasons are never read.
struct Reason {
  enum class Why : uint8_t { kAllReady, kNew, kChanged, kRefused, kCacheFull, kSetRemoved, kRankLeft };
  Why why = Why::kAllReady;
  // Tensors (kAllReady, kNew, kChanged, kSetRemoved), ids defined (kCacheFull), ranks (kRefused, kRankLeft).
  int32_t count = 0;
  int64_t bytes = 0;

  std::string text() const;  // e.g. "3 tensors, 12288 bytes, all ranks ready"
};

// One log record, why it was made, and for whom. Everybody reads it sometime, but it makes nobody else do anything.
struct Decision {
  Record record;
  Reason reason;
  std::vector<int> concerned;  // ranks, ascending; empty: all
};

// The id that the next process set gets: the lowest that is free. `process_sets`: a map from the ids in use.
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
  std::vector<int> members = {};  // of the process set
};

class Coordinator {
 public:
  explicit Coordinator(const CoordinatorOptions& options);
  ~Coordinator();

  // `sent`: when, in nanoseconds of the host's clock; messages of different ranks need not come in this order. It is
  // only stored, for pending() and lateness(). A message that no correct rank sends is an error, and the job is broken.
  Status on_message(int rank, const Message& message, uint64_t sent);
  // The same of all the ranks for which the message speaks, as if each of them had sent it. `came`: when it came, by
  // the host's clock. What is known by an id costs the same for any number of ranks in a row.
  Status on_message(const Message& message, uint64_t came);
  // The hot path of on_message for Type::kReady.
  Status on_ready(int rank, TensorId id, uint64_t sent);

  // Appends what is decided since the last call, in log order.
  void decide(std::vector<Decision>* decisions);

  void set_fusion_threshold(int64_t num_bytes);

  // What is waited for since `latest` or longer, oldest first.
  std::vector<Pending> pending(uint64_t latest = UINT64_MAX) const;
  // By rank.
  const std::vector<StragglerStats>& lateness() const;
  // Requests that came with a full signature, from all ranks together.
  uint64_t negotiated_in_full() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hvl
