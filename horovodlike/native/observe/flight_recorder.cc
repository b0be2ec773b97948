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

void FlightRecorder::begin(const CollectiveRecord& record) {
  current_ = record;
  const uint64_t index = num_begun_.load(std::memory_order_relaxed);
  write(&slots_[index % capacity_]);
  num_begun_.store(index + 1, std::memory_order_release);
}

void FlightRecorder::end(uint64_t now) {
  current_.ended_at = now;
  write(&slots_[(num_begun_.load(std::memory_order_relaxed) - 1) % capacity_]);
}

// Each store of a word is a release: a reader that sees a new word also sees the odd version, or a later one.
void FlightRecorder::write(Slot* slot) {
  uint64_t words[kWords];
  memcpy(words, &current_, sizeof words);
  const uint64_t version = slot->version.load(std::memory_order_relaxed);
  slot->version.store(version + 1, std::memory_order_relaxed);
  for (size_t word = 0; word < kWords; ++word) slot->words[word].store(words[word], std::memory_order_release);
  slot->version.store(version + 2, std::memory_order_release);
}

std::vector<CollectiveRecord> FlightRecorder::read() const {
  std::vector<CollectiveRecord> records;
  const uint64_t end = num_begun_.load(std::memory_order_acquire);
  for (uint64_t index = end - std::min<uint64_t>(end, capacity_); index < end; ++index) {
    const Slot& slot = slots_[index % capacity_];
    uint64_t words[kWords];
    const uint64_t version = slot.version.load(std::memory_order_acquire);
    for (size_t word = 0; word < kWords; ++word) words[word] = slot.words[word].load(std::memory_order_acquire);
    if (version % 2 != 0 || slot.version.load(std::memory_order_relaxed) != version) continue;
    CollectiveRecord record;
    memcpy(static_cast<void*>(&record), words, sizeof words);
    records.push_back(record);
  }
  // Restores the order: a slot may have been overwritten with a newer record meanwhile.
  std::sort(records.begin(), records.end(),
            [](const CollectiveRecord& a, const CollectiveRecord& b) { return a.number < b.number; });
  return records;
}

std::string to_json(const std::vector<CollectiveRecord>& records) {
  const EpochClock clock;
  std::string json = "[";
  for (const CollectiveRecord& record : records) {
    json += json.size() > 1 ? ",\n" : "\n";
    json += "{\"number\": " + std::to_string(record.number) + ", \"kind\": " + quoted(name_of(record.kind)) +
            ", \"name\": " + quoted(record.name) + ", \"requests\": " + std::to_string(record.num_requests) +
            ", \"bytes\": " + std::to_string(record.num_bytes) +
            ", \"process_set\": " + std::to_string(record.process_set) +
            ", \"enqueued\": " + clock.seconds(record.enqueued_at) + ", \"begun\": " + clock.seconds(record.begun_at) +
            ", \"ended\": " + (record.ended_at == 0 ? "null" : clock.seconds(record.ended_at)) + "}";
  }
  return json + "\n]";
}

}  // namespace hvl
