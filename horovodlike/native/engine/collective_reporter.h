// Reports the collectives of this rank to the user: counters, flight recorder, timeline, and the text of errors.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/data_plane.h"
#include "engine/engine_context.h"
#include "observe/flight_recorder.h"
#include "observe/timeline.h"

namespace hvl {

// A collective of the log in which this rank takes part.
struct Collective {
  uint64_t number = 0;            // its place among the collectives of the log, from 1
  uint64_t begun_at = 0;          // when its record was read from the log
  TeamPtr team;                   // the ranks that take part
  const Team* members = nullptr;  // all ranks of the process set, also those that take no part
  const Team* counted = nullptr;  // an average divides by its size: `team` or `members`
  std::vector<NamedTensor*> tensors;

  const PendingRequest& first() const { return *tensors.front()->request; }
};

class CollectiveReporter {
 public:
  explicit CollectiveReporter(EngineContext* context)
      : context_(*context),
        flight_recorder_(context->options.flight_recorder_size),
        timeline_(context->options.rank, context->options.size),
        profile_timeline_(context->options.rank, context->options.size) {}

  const FlightRecorder& flight_recorder() const { return flight_recorder_; }
  Timeline& timeline() { return timeline_; }
  // A second one, for a profile of some steps, so that the user's timeline stays as it is.
  Timeline& profile_timeline() { return profile_timeline_; }

  // Only the holder of the engine lock may call the rest.
  void begin(const Collective& collective);
  // `transport`: the one that carried the tensors.
  void end(hvl_transport transport);

  // Returns the error for this rank's requests when the job has ended: `reason`, a hint, and the requests in flight.
  Status explain(const Status& reason, const std::vector<const PendingRequest*>& in_flight) const;
  // Writes the flight recorder's file. Called before any request fails with the error: the process may exit as soon as
  // one does.
  void write_records(const Status& reason, const std::vector<const PendingRequest*>& in_flight) const;

 private:
  EngineContext& context_;
  FlightRecorder flight_recorder_;
  Timeline timeline_;
  Timeline profile_timeline_;
  uint64_t begun_at_ = 0;  // start of the collective under way
  int64_t num_bytes_ = 0;  // size of its tensors
};

}  // namespace hvl
