// What the leader of a host below the first one does with what the ranks of its host and its child hosts tell the
// coordinator: it puts together what they say of one tensor, so that its parent gets one message for all of them.
//
// Pure: no clock, thread or I/O. It never decides anything. What it says of each rank is what the rank has said, in an
// order in which the rank could have said it; it only says it later, at most by the patience. What it cannot put
// together it passes on.
//
// A rank announces by the log as far as it has read it. The aggregator has read at least as far: observe() comes first.
// So an id that it does not know stands for nothing any more, and goes on to the coordinator, which knows why.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "negotiate/message.h"

namespace hvl {

struct AggregatorOptions {
  RankSet ranks;  // of this host and of all hosts below it
  // What some of these ranks have ready and others not is passed on when it is that old, for who looks for stalls.
  uint64_t patience = 100 * kMillisecond;
};

class Aggregator {
 public:
  explicit Aggregator(AggregatorOptions options);
  ~Aggregator();

  // `message` says for which ranks it speaks. `now`: when it came, by this host's clock. A message that no correct rank
  // sends is an error, and the job is broken.
  Status accept(const Message& message, uint64_t now);
  // Every record of the log, before a rank of this host or of a host below it can read it.
  void observe(const Record& record);
  // Appends what is to be sent to the parent host, in this order, at `now`. Call it after what is there was accepted.
  void take(uint64_t now, std::vector<Message>* messages);
  // When take() has something though nothing else was accepted, by this host's clock. 0: at once; UINT64_MAX: never.
  uint64_t next_deadline() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hvl
