#include "observe/flight_recorder.h"

#include <algorithm>
#include <cstring>

#include "base/json.h"

namespace hvl {

void CollectiveRecord::set_name(const std::string& text) {
  size_t length = std::min(text.size(), sizeof name - 1);
  const auto is_inside_a_character = [&] { return (static_cast<unsigned char>(text[length]) & 0xc0u) == 0x80u; };
  while (length < text.size() && length > 0 && is_inside_a_character()) --length;
  memcpy(name, text.data(), length);
  name[length] = '\0';
}

FlightRecorder::FlightRecorder(size_t capacity)
    : capacity_(std::max<size_t>(1, capacity)), slots_(std::make_unique<Slot[]>(capacity_)) {}

void FlightRecorder::begin(const CollectiveRecord& flight) {
  current_ = flight;
  const uint64_t index = num_begun_.load(std::memory_order_relaxed);
  write(&slots_[index % capacity_]);
  num_begun_.store(index + 1, std::memory_order_release);
}

void FlightRecorder::end(uint64_t now) {
  current_.ended_at = now;
  write(&slots_[(num_begun_.load(std::memory_order_relaxed) - 1) % capacity_]);
}

// Each store is a release: a reader that sees a new word also sees that the version was odd, or is another one.
void FlightRecorder::write(Slot* slot) {
  uint64_t words[kWords];
  memcpy(words, &current_, sizeof words);
  const uint64_t version = slot->version.load(std::memory_order_relaxed);
  slot->version.store(version + 1, std::memory_order_relaxed);
  for (size_t word = 0; word < kWords; ++word) slot->words[word].store(words[word], std::memory_order_release);
  slot->version.store(version + 2, std::memory_order_release);
}

std::vector<CollectiveRecord> FlightRecorder::read() const {
  std::vector<CollectiveRecord> flights;
  const uint64_t end = num_begun_.load(std::memory_order_acquire);
  for (uint64_t index = end - std::min<uint64_t>(end, capacity_); index < end; ++index) {
    const Slot& slot = slots_[index % capacity_];
    uint64_t words[kWords];
    const uint64_t version = slot.version.load(std::memory_order_acquire);
    for (size_t word = 0; word < kWords; ++word) words[word] = slot.words[word].load(std::memory_order_acquire);
    if (version % 2 != 0 || slot.version.load(std::memory_order_relaxed) != version) continue;
    CollectiveRecord flight;
    memcpy(static_cast<void*>(&flight), words, sizeof words);
    flights.push_back(flight);
  }
  // A slot may have been used again meanwhile.
  std::sort(flights.begin(), flights.end(),
            [](const CollectiveRecord& a, const CollectiveRecord& b) { return a.number < b.number; });
  return flights;
}

std::string to_json(const std::vector<CollectiveRecord>& flights) {
  const EpochClock clock;
  std::string json = "[";
  for (const CollectiveRecord& flight : flights) {
    json += json.size() > 1 ? ",\n" : "\n";
    json += "{\"number\": " + std::to_string(flight.number) + ", \"kind\": " + quoted(name_of(flight.kind)) +
            ", \"name\": " + quoted(flight.name) + ", \"requests\": " + std::to_string(flight.num_requests) +
            ", \"bytes\": " + std::to_string(flight.num_bytes) +
            ", \"process_set\": " + std::to_string(flight.process_set) +
            ", \"enqueued\": " + clock.seconds(flight.enqueued_at) + ", \"begun\": " + clock.seconds(flight.begun_at) +
            ", \"ended\": " + (flight.ended_at == 0 ? "null" : clock.seconds(flight.ended_at)) + "}";
  }
  return json + "\n]";
}

}  // namespace hvl
