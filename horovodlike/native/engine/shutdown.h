// The end of the job on this rank, by a shutdown or because the job is broken: the exchange of the last messages, and
// the completion of all requests with an error. Only the holder of the engine lock may use it.
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
  // Ends the job on this rank once its GPU and messages are done: call it repeatedly after the end of the log, until
  // has_ended().
  Status leave();
  // Breaks the job on all ranks with the reason in `status`, unless another rank reports the cause of the failure.
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
