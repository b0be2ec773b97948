// Checks that the other ranks are alive, and that the coordinator and this rank's GPU make progress. For the thread
// that holds the engine lock.
#pragma once

#include <string>

#include "engine/negotiator.h"

namespace hvl {

class PeerWatch {
 public:
  PeerWatch(EngineContext* context, RequestTable* requests, Executor* executor, Negotiator* negotiator)
      : context_(*context), requests_(*requests), executor_(*executor), negotiator_(*negotiator) {}

  // An error breaks the job.
  Status check();

 private:
  Status check_coordinator(uint64_t now);
  bool is_on_coordinators_host() const { return context_.options.host_of(context_.options.rank) == 0; }
  std::string describe_coordinator() const;
  std::string describe_silence(uint64_t seconds) const;

  EngineContext& context_;
  RequestTable& requests_;
  Executor& executor_;
  Negotiator& negotiator_;
  uint64_t last_check_ = 0;
  uint32_t inquiries_ = 0;     // of HostHeader, as last seen
  uint64_t last_inquiry_ = 0;  // when their number last changed
};

}  // namespace hvl
