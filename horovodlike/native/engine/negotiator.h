// Negotiates the requests of this rank with the coordinator, and reads the log, which all ranks run in the same order.
// Only the holder of the engine lock may use it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/executor.h"

namespace hvl {

class Negotiator {
 public:
  Negotiator(EngineContext* context, RequestTable* requests, Executor* executor, GpuExecutor* gpu);

  // Tells the coordinator that this rank shuts down.
  Status announce_stop();
  uint64_t stop_announced_at() const { return stop_announced_at_; }  // 0: not yet
  // Takes all requests from the queue and announces them.
  Status submit();
  // Takes the requests that are not announced, first those left by an exception in submit(). Called when the job ends.
  void gather_queued();

  // Applies the next record of the log; *found is false if there is none.
  Status run_next(bool* found);
  uint64_t last_record() const { return last_record_; }      // when a record was last read
  uint64_t leaving_since() const { return leaving_since_; }  // when the log ended; 0: it has not
  const std::string& why_it_ended() const { return why_it_ended_; }
  bool has_process_sets() const { return process_sets_.size() > 1; }
  Fault& fault() { return fault_; }

 private:
  Status check_process_set(const Signature& signature) const;
  Status announce(NamedTensor* tensor);
  Status apply(const Record& record);
  Status check_definition(const Record& record) const;
  Status define(const Record& record);
  Status evict(const Record& record);
  Status forget(TensorId id, bool keeps_announcement);
  void fail(const Record& record);
  Status execute(const Record& record);
  TeamPtr team_without(const TeamPtr& members, const std::vector<int32_t>& absent) const;
  Status change_process_sets(const Signature& signature, NamedTensor* tensor);

  EngineContext& context_;
  RequestTable& requests_;
  Executor& executor_;
  GpuExecutor& gpu_;
  Fault fault_;
  std::vector<std::unique_ptr<PendingRequest>> new_requests_;
  Message ready_;
  Record record_;
  std::map<int32_t, TeamPtr> process_sets_;  // by id; 0 has all ranks
  Collective next_;                          // the collective of the current record, for the executor
  uint64_t num_executed_ = 0;                // collectives of the log, also those without this rank
  uint64_t stop_announced_at_ = 0;
  uint64_t last_record_ = now_ns();
  uint64_t leaving_since_ = 0;
  std::string why_it_ended_;
};

}  // namespace hvl
