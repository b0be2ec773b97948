// The end of the job on this rank, in good order or broken: the last messages, and the errors of all requests. For the
// holder of the engine lock.
#pragma once

#include "engine/negotiator.h"

namespace hvl {

class Shutdown {
 public:
  Shutdown(EngineContext* context, RequestTable* requests, Executor* executor, Negotiator* negotiator,
           CollectiveReporter* reporter, TuningObserver* tuner, GpuExecutor* gpu)
      : context_(*context),
        requests_(*requests),
        executor_(*executor),
        negotiator_(*negotiator),
        reporter_(*reporter),
        tuner_(*tuner),
        gpu_(*gpu) {}

  bool has_ended() const { return has_ended_; }
  // The log has ended: ends the job on this rank, unless a GPU still works; then it is called again.
  Status leave();
  // Ends the job on all ranks for the reason of `status`, unless there is a better one.
  void break_job(Status status);
  void flush_before_leaving();

 private:
  Status receive_last_messages();
  void hear_why(Status* status);
  void end(const Status& reason);

  EngineContext& context_;
  RequestTable& requests_;
  Executor& executor_;
  Negotiator& negotiator_;
  CollectiveReporter& reporter_;
  TuningObserver& tuner_;
  GpuExecutor& gpu_;
  bool has_ended_ = false;
};

}  // namespace hvl
