// The part of the engine that keeps what it tells about itself.

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <string>
#include <tuple>
#include <utility>

#include "base/json.h"
#include "base/log.h"
#include "engine/engine.h"

namespace hvl {

namespace {

constexpr size_t kMaxNamed = 5;

std::string describe(const PendingRequest& entry, const EpochClock& clock) {
  const Signature& signature = entry.signature();
  return "{\"kind\": " + quoted(name_of(signature.kind)) + ", \"name\": " + quoted(signature.name) +
         ", \"bytes\": " + std::to_string(entry.operation->total_bytes) +
         ", \"process_set\": " + std::to_string(signature.process_set) +
         ", \"enqueued\": " + clock.seconds(entry.enqueued_at) + "}";
}

}  // namespace

// When the collective began is when its record was found: no further look at the clock is needed.
void Engine::note_begin() {
  const uint64_t begun = last_record_;
  const Signature& first = tensors_.front()->entry->signature();
  CollectiveRecord flight;
  flight.number = num_executed_;
  flight.begun_at = flight.enqueued_at = begun;
  flight.kind = first.kind;
  flight.process_set = first.process_set;
  flight.num_requests = static_cast<int32_t>(tensors_.size());
  flight.set_name(first.name);
  uint64_t negotiated = 0;
  for (const NamedTensor* tensor : tensors_) {
    const uint64_t enqueued = std::min(tensor->entry->enqueued_at, begun);
    flight.num_bytes += tensor->entry->operation->total_bytes;
    flight.enqueued_at = std::min(flight.enqueued_at, enqueued);
    negotiated += begun - enqueued;
  }
  collective_records_.begin(flight);
  timeline_.begin(tensors_, num_executed_, begun);
  begun_ = begun;
  counters_.batches.fetch_add(1, std::memory_order_relaxed);
  counters_.executed.fetch_add(flight.num_requests, std::memory_order_relaxed);
  counters_.negotiation_time.fetch_add(static_cast<int64_t>(negotiated), std::memory_order_relaxed);
}

void Engine::note_end() {
  const uint64_t now = now_ns();
  collective_records_.end(now);
  timeline_.end(now);
  counters_.execution_time.fetch_add(static_cast<int64_t>(now - begun_), std::memory_order_relaxed);
}

// The oldest first.
std::vector<const PendingRequest*> Engine::in_flight() const {
  std::vector<const PendingRequest*> entries;
  const auto add = [&](const NamedTensor* tensor) {
    if (tensor != nullptr && tensor->entry != nullptr) entries.push_back(tensor->entry.get());
  };
  for (const auto& waiting : in_full_) add(waiting.second.get());
  for (const auto& known : known_) add(known.second.tensor.get());
  std::sort(entries.begin(), entries.end(), [](const PendingRequest* one, const PendingRequest* other) {
    return std::tie(one->enqueued_at, one->handle, one) < std::tie(other->enqueued_at, other->handle, other);
  });
  // What has changed is known by its id and announced in full.
  entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
  return entries;
}

// Return the reason why the job has ended, for those that wait for a result on this rank.
Status Engine::with_what_is_in_flight(const Status& reason) const {
  std::string text = reason.message();
  if (reason.code() == HVL_SHUT_DOWN && !stop_requested_.load()) {
    text +=
        ". If it has only run out of batches before the others: call hvd.join() after the last one, or give all ranks "
        "as many";
  }
  const std::vector<const PendingRequest*> entries = in_flight();
  if (entries.empty()) return Status(reason.code(), std::move(text));
  // A report of several lines gets one more.
  text += (text.find('\n') == std::string::npos ? ". " : "\n") + std::string("In flight here: ");
  const size_t num_named = std::min(entries.size(), kMaxNamed);
  for (size_t i = 0; i < num_named; ++i) {
    const Signature& signature = entries[i]->signature();
    text += (i == 0 ? "" : ", ") + std::string(name_of(signature.kind)) + " of '" + signature.name + "'";
  }
  if (entries.size() > num_named) text += " and " + std::to_string(entries.size() - num_named) + " more";
  return Status(reason.code(), std::move(text));
}

// Before anybody hears of the error: a process that does may end at once.
void Engine::write_flights(const Status& reason) const {
  if (options_.flight_recorder_folder.empty()) return;
  const EpochClock clock;
  std::string described;
  for (const PendingRequest* entry : in_flight()) {
    described += (described.empty() ? "\n" : ",\n") + describe(*entry, clock);
  }
  mkdir(options_.flight_recorder_folder.c_str(), 0777);  // if it is not there
  const std::string path = options_.flight_recorder_folder + "/rank" + std::to_string(options_.rank) + ".json";
  std::ofstream file(path);
  file << "{\"rank\": " << options_.rank << ", \"size\": " << options_.size << ", \"pid\": " << getpid()
       << ", \"written\": " << clock.seconds(now_ns()) << ", \"reason\": " << quoted(reason.message())
       << ",\n\"collectives\": " << to_json(collective_records_.read()) << ",\n\"in_flight\": [" << described
       << "\n]}\n";
  file.close();
  if (!file) log(LogLevel::kWarning, "cannot write what the flight recorder has to '" + path + "'");
}

}  // namespace hvl
