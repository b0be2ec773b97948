// The coordinator's state. Only coordinator*.cc include this header.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "negotiate/coordinator.h"
#include "negotiate/rank_set.h"
#include "negotiate/tensor_table.h"

namespace hvl {

struct ProcessSet {
  std::vector<int> members;  // ascending
  RankSet ranks;             // the members as a RankSet
  std::unordered_map<std::string, TensorId> names;
  std::vector<TensorId> joined;  // by rank: the join that it waits in; kNoId: it has not joined
  int32_t num_joined = 0;
  int last_joined = -1;
  bool is_by_members = false;  // added by its members alone: other ranks may not know its id

  int32_t num_active() const { return static_cast<int32_t>(members.size()) - num_joined; }
  bool has_joined(int rank) const { return joined[static_cast<size_t>(rank)] != kNoId; }
  bool is_joined_by(const TensorState& join) const {
    return num_joined > 0 && std::find(joined.begin(), joined.end(), join.id) != joined.end();
  }
};

// Allreduces that will be executed together. More are added until a record must come after them in the log.
struct OpenBatch {
  int32_t process_set = 0;
  Device device = HVL_CPU;
  std::vector<int32_t> absent;
  int64_t bytes = 0;
  int32_t num_tensors = 0;
  std::vector<TensorId> ids;
  uint8_t transport = HVL_BY_ENGINE;
};

// The times at which ranks were ready, by the host's clock.
struct Readiness {
  uint64_t since;  // when the first rank was ready
  ReadyMark last;
};

// The errors of a rank that is no member of the process set: it announced an id, or requested `signature`.
Status not_a_member(int rank);
Status not_a_member(int rank, const Signature& signature);
Decision make_error(const Signature& request, const Status& status, int32_t num_ranks);

struct Coordinator::State {
  explicit State(const CoordinatorOptions& given);

  // Null: there is no such process set.
  ProcessSet* find_process_set(int32_t process_set) {
    const auto found = process_sets.find(process_set);
    return found == process_sets.end() ? nullptr : &found->second;
  }

  bool is_member(int32_t process_set, int rank) {
    const std::vector<int>& members = find_process_set(process_set)->members;
    return std::binary_search(members.begin(), members.end(), rank);
  }

  // Messages.
  Status on_ready(int rank, TensorId id, uint64_t sent);
  Status on_request(int rank, const Signature& signature, uint64_t sent);
  Status add_ready(TensorState* tensor, int rank, Kind kind, uint64_t sent);
  Status announced_again(const TensorState& tensor, int rank);
  void note_ready(TensorState* tensor, bool is_first, const Readiness& readiness);
  void complete(TensorState* tensor, bool joins);
  Status stale_or_unknown(int rank, TensorId id);
  TensorState* find_or_add(ProcessSet* set, const Signature& signature);
  void shut_down(int rank, const std::string& text);

  // Messages for several ranks: coordinator_ranks.cc.
  Status on_ready(const Message& message, TensorId id, const Readiness& readiness);
  Status on_request(const Message& request, const Readiness& readiness);
  Status add_ready(TensorState* tensor, const RankSet& ranks, const Readiness& readiness);
  bool any_has_joined(const RankSet& ranks) const;

  // Decisions.
  void decide_completed(std::vector<Decision>* decisions);
  TensorState* settle(TensorState* tensor, std::vector<Decision>* decisions);
  TensorState* define(TensorState* tensor, Verdict verdict, std::vector<Decision>* decisions);
  void remove(TensorState* tensor);
  void execute(TensorState* tensor, std::vector<Decision>* decisions);
  Decision make_execute(OpenBatch batch);
  void make_idle(TensorState* tensor);
  OpenBatch* batch_for(const TensorState& tensor, const std::vector<int32_t>& absent, std::vector<Decision>* decisions);
  size_t likely_batch(const TensorState& first) const;
  void close_batches(std::vector<Decision>* decisions);
  void evict(std::vector<Decision>* decisions);
  void refuse(TensorState* tensor, const Status& status, std::vector<Decision>* decisions);

  // Process sets and joined ranks: coordinator_sets.cc.
  Status check_change(const Signature& signature);
  bool is_by_members(const TensorState& tensor) const;
  bool waits_for(const TensorState& tensor, const ProcessSet& set, int rank) const;
  void add_process_set(std::vector<int> members, bool is_by_members);
  void remove_process_set(int32_t process_set, std::vector<Decision>* decisions);
  void on_join(const TensorState& join, int rank);
  void forget_joins(const TensorState& join);
  bool only_joins(const TensorState& tensor);
  TensorState* with_new_id(TensorId id);
  void before_more_of(int rank);
  void end_join();
  std::vector<int32_t> absent_from(const TensorState& tensor);
  std::vector<int> concerned_by(int32_t process_set, const std::vector<int32_t>& absent);
  Status check_absent(const TensorState& tensor, const std::vector<int32_t>& absent);

  CoordinatorOptions options;
  std::map<int32_t, ProcessSet> process_sets;  // by id; 0 has all ranks
  std::vector<int32_t> num_joins;              // by rank: process sets on which it has joined
  int32_t num_joined = 0;                      // the sum of these
  TensorTable table;
  std::vector<TensorId> completed;  // ready on all members and not decided yet; in order of completion
  std::vector<Decision> early;      // decided before decide() was called
  std::vector<OpenBatch> batches;   // open ones while deciding, one per process set, device, absent ranks and transport
  size_t num_undecided = 0;         // undecided tensors in `completed`, while deciding
  uint64_t num_requests = 0;
  std::vector<StragglerStats> straggler_stats;  // by rank
  bool join_is_complete = false;                // a join on some process set is complete and not decided yet
  bool shutting_down = false;
  bool shutdown_decided = false;
  std::string shutdown_text;
};

}  // namespace hvl
