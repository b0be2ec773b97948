// The aggregator of a leader other than the root: it merges the messages of its host's ranks and of its child hosts to
// the coordinator about one tensor, so that its parent receives one message for all of them.
//
// Pure: no clock, thread or I/O. It never decides anything. For each rank it sends only messages that the rank has
// sent, in an order in which the rank could have sent them; it delays a message by AggregatorOptions::patience at most.
// It passes on messages that it cannot merge.
//
// A rank announces a tensor by the id that the log has given it. The aggregator has always read the log at least as far
// as the rank, because observe() sees each record first. So an id that the aggregator does not know is no longer
// defined; it is passed on to the coordinator, which knows the reason.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "negotiate/message.h"

namespace hvl {

struct AggregatorOptions {
  RankSet ranks;  // the ranks of this host and of all hosts below it
  // A tensor that some of these ranks have ready and others not is passed on at this age, for the detection of stalls.
  uint64_t patience = 100 * kMillisecond;
};

class Aggregator {
 public:
  explicit Aggregator(AggregatorOptions options);
  ~Aggregator();

  // Combines a message with the others. `message` must list the ranks for which it speaks; `now` is its time of arrival
  // by this host's clock. An error, for an invalid message, must break the job.
  Status accept(const Message& message, uint64_t now);
  // Takes every record of the log, before a rank of this host or of a host below it can read it.
  void observe(const Record& record);
  // Appends the messages to send to the parent host, in this order, at `now`. Call it after accepting all available
  // messages.
  void take(uint64_t now, std::vector<Message>* messages);
  // The time at which take() returns messages even if nothing else is accepted, by this host's clock. 0: at once;
  // UINT64_MAX: never.
  uint64_t next_deadline() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hvl
