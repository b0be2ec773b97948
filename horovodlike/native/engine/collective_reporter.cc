#include "engine/collective_reporter.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <utility>

#include "base/json.h"
#include "base/log.h"

namespace hvl {

namespace {

constexpr size_t kMaxNamed = 5;

std::string describe(const PendingRequest& request, const EpochClock& clock) {
  const Signature& signature = request.signature();
  return "{\"kind\": " + quoted(name_of(signature.kind)) + ", \"name\": " + quoted(signature.name) +
         ", \"bytes\": " + std::to_string(request.operation->total_bytes) +
         ", \"process_set\": " + std::to_string(signature.process_set) +
         ", \"enqueued\": " + clock.seconds(request.enqueued_at) + "}";
}

}  // namespace

// Takes the time at which the record was read as the collective's start, to save a call of the clock.
void CollectiveReporter::begin(const Collective& collective) {
  const uint64_t begun = collective.begun_at;
  const Signature& first = collective.first().signature();
  CollectiveRecord record;
  record.number = collective.number;
  record.begun_at = record.enqueued_at = begun;
  record.kind = first.kind;
  record.process_set = first.process_set;
  record.num_requests = static_cast<int32_t>(collective.tensors.size());
  record.set_name(first.name);
  uint64_t negotiated = 0;
  for (const NamedTensor* tensor : collective.tensors) {
    const uint64_t enqueued = std::min(tensor->request->enqueued_at, begun);
    record.num_bytes += tensor->request->operation->total_bytes;
    record.enqueued_at = std::min(record.enqueued_at, enqueued);
    negotiated += begun - enqueued;
  }
  flight_recorder_.begin(record);
  const int num_ranks = collective.team->size();
  timeline_.begin(collective.tensors, collective.number, num_ranks, begun);
  profile_timeline_.begin(collective.tensors, collective.number, num_ranks, begun);
  begun_at_ = begun;
  num_bytes_ = record.num_bytes;
  EngineCounters& counters = context_.counters;
  counters.time.begin(begun);
  counters.batches.fetch_add(1, std::memory_order_relaxed);
  counters.executed.fetch_add(record.num_requests, std::memory_order_relaxed);
  counters.negotiation_time.fetch_add(static_cast<int64_t>(negotiated), std::memory_order_relaxed);
}

void CollectiveReporter::end(hvl_transport transport) {
  const uint64_t now = now_ns();
  flight_recorder_.end(now);
  timeline_.end(now);
  profile_timeline_.end(now);
  context_.counters.time.end(now);
  context_.counters.execution_time.fetch_add(static_cast<int64_t>(now - begun_at_), std::memory_order_relaxed);
  context_.counters.carried_bytes[transport].fetch_add(num_bytes_, std::memory_order_relaxed);
}

Status CollectiveReporter::explain(const Status& reason, const std::vector<const PendingRequest*>& in_flight) const {
  std::string text = reason.message();
  const bool says_why = text.find(" has shut the job down: ") != std::string::npos;
  if (reason.code() == HVL_SHUT_DOWN && !says_why && !context_.stop_requested.load()) {
    text +=
        ". Usual reasons: it has run out of batches before the others (call hvd.join() after the last one, or give all "
        "ranks as many), has called fewer barriers (is one inside `if rank() == 0`?), or has stopped early by itself "
        "(let all ranks decide alike)";
  }
  if (in_flight.empty()) return Status(reason.code(), std::move(text));
  // A reason of several lines is followed by one more line.
  text += (text.find('\n') == std::string::npos ? ". " : "\n") + std::string("In flight here: ");
  const size_t num_named = std::min(in_flight.size(), kMaxNamed);
  for (size_t i = 0; i < num_named; ++i) {
    const Signature& signature = in_flight[i]->signature();
    text += (i == 0 ? "" : ", ") + std::string(name_of(signature.kind)) + " of '" + signature.name + "'";
  }
  if (in_flight.size() > num_named) text += " and " + std::to_string(in_flight.size() - num_named) + " more";
  return Status(reason.code(), std::move(text));
}

void CollectiveReporter::write_records(const Status& reason,
                                       const std::vector<const PendingRequest*>& in_flight) const {
  const EngineOptions& options = context_.options;
  if (options.flight_recorder_folder.empty()) return;
  const EpochClock clock;
  std::string described;
  for (const PendingRequest* request : in_flight) {
    described += (described.empty() ? "\n" : ",\n") + describe(*request, clock);
  }
  mkdir(options.flight_recorder_folder.c_str(), 0777);  // if it does not exist
  const std::string path = options.flight_recorder_folder + "/rank" + std::to_string(options.rank) + ".json";
  std::ofstream file(path);
  file << "{\"rank\": " << options.rank << ", \"size\": " << options.size << ", \"pid\": " << getpid()
       << ", \"written\": " << clock.seconds(now_ns()) << ", \"reason\": " << quoted(reason.message())
       << ",\n\"collectives\": " << to_json(flight_recorder_.read()) << ",\n\"in_flight\": [" << described << "\n]}\n";
  file.close();
  if (!file) log(LogLevel::kWarning, "cannot write what the flight recorder has to '" + path + "'");
}

}  // namespace hvl
