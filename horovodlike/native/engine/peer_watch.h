// Checks that the other ranks are alive, and that the coordinator and this rank's GPU make progress. Only the holder of
// the engine lock may use it.
#pragma once

#include <string>

#include "engine/negotiator.h"

namespace hvl {

class PeerWatch {
 public:
  PeerWatch(EngineContext* context, const RequestTable* requests, const Negotiator* negotiator, GpuExecutor* gpu)
      : context_(*context), requests_(*requests), negotiator_(*negotiator), gpu_(*gpu) {}

  // An error breaks the job.
  Status check();
  // True if check() must watch this rank's GPU even if nothing else happens.
  bool watches_gpu() const { return gpu_.is_busy(); }

 private:
  Status check_coordinator(uint64_t now);
  Status check_messages(uint64_t now);
  bool is_on_coordinators_host() const { return context_.options.host_of(context_.options.rank) == 0; }
  std::string describe_coordinator() const;
  std::string describe_silence(uint64_t seconds) const;

  EngineContext& context_;
  const RequestTable& requests_;
  const Negotiator& negotiator_;
  GpuExecutor& gpu_;
  uint64_t last_check_ = 0;
  uint32_t inquiries_ = 0;     // the value of HostHeader::inquiries that was last seen
  uint64_t last_inquiry_ = 0;  // when that value last changed
  uint64_t idle_at_ = 0;       // when last no thread waited for a message
  int64_t stalled_ = 0;        // the handle of the receive that was last reported as stalled
};

}  // namespace hvl
