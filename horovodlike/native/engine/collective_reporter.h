// Records the collectives of this rank for its user: counters, flight recorder, timeline, and the text of errors.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/data_plane.h"
#include "engine/engine_context.h"
#include "observe/flight_recorder.h"
#include "observe/timeline.h"

namespace hvl {

// A collective that the log asks for, with this rank in it.
struct Collective {
  uint64_t number = 0;            // of those of the log, from 1
  uint64_t begun_at = 0;          // when its record was found
  TeamPtr team;                   // the ranks that take part
  const Team* members = nullptr;  // the process set: those that do not take part, too
  const Team* counted = nullptr;  // the ranks whose number an average divides by: one of these two
  std::vector<NamedTensor*> tensors;

  const PendingRequest& first() const { return *tensors.front()->request; }
};

class CollectiveReporter {
 public:
  explicit CollectiveReporter(EngineContext* context)
      : context_(*context), flight_recorder_(context->options.flight_recorder_size), timeline_(context->options.rank) {}

  const FlightRecorder& flight_recorder() const { return flight_recorder_; }
  Timeline& timeline() { return timeline_; }

  // The rest is for the holder of the engine lock.
  void begin(const Collective& collective);
  void end();

  // The reason why the job has ended, for the threads that wait for a result on this rank.
  Status explain(const Status& reason, const std::vector<const PendingRequest*>& in_flight) const;
  // Write the flight recorder's file. It is called before any thread hears of the error: a process that does may end at
  // once.
  void write_records(const Status& reason, const std::vector<const PendingRequest*>& in_flight) const;

 private:
  EngineContext& context_;
  FlightRecorder flight_recorder_;
  Timeline timeline_;
  uint64_t begun_at_ = 0;  // of the collective under way
};

}  // namespace hvl
