#include "observe/flight_recorder.h"

#include <algorithm>
#include <cstring>

#include "base/clock.h"

namespace hvl {

namespace {

constexpr uint64_t kHashes = 1ull << 32;
constexpr uint64_t kPause = kMillisecond;
// One in kDropped collectives without a pause is sampled: the sample covers a second at 32,000 collectives per second.
constexpr uint64_t kDropped = 64;

// Knuth's multiplicative hash: so that the choice does not follow the order of tensors in a step.
uint64_t hash(uint64_t number) { return number * 2654435761u % kHashes; }

// Those with low numbers are chosen first.
uint64_t place_in_sample(const CollectiveRecord& record) {
  return hash(record.number) + (record.pause >= kPause ? 0 : kHashes);
}

bool is_older(const CollectiveRecord& one, const CollectiveRecord& other) { return one.number < other.number; }

}  // namespace

void CollectiveRecord::set_name(const std::string& text) {
  size_t length = std::min(text.size(), sizeof name - 1);
  const auto is_inside_a_character = [&] { return (static_cast<unsigned char>(text[length]) & 0xc0u) == 0x80u; };
  while (length < text.size() && length > 0 && is_inside_a_character()) --length;
  memcpy(name, text.data(), length);
  name[length] = '\0';
}

FlightRecorder::FlightRecorder(size_t capacity) : recent_(std::max<size_t>(1, capacity)) {}

void FlightRecorder::begin(const CollectiveRecord& record) {
  const uint64_t since = current_.ended_at;
  current_ = record;
  current_.pause = since != 0 && record.begun_at > since ? record.begun_at - since : 0;
  recent_.append(current_);
  if (place_in_sample(current_) < kHashes + kHashes / kDropped) sampled_.append(current_);
}

void FlightRecorder::end(uint64_t now) {
  current_.ended_at = now;
  recent_.replace_last(current_);
}

std::vector<CollectiveRecord> FlightRecorder::sample(uint64_t* after, size_t most) const {
  std::vector<CollectiveRecord> records = recent_.read(kSampled);
  const bool is_full = records.size() >= std::min(recent_.capacity(), kSampled);
  const uint64_t before = *after;
  if (!records.empty()) *after = records.back().number;
  if (is_full && records.front().number > before + 1) records = sampled_.read(kSampled);
  const auto is_known = [&](const CollectiveRecord& record) { return record.number <= before; };
  records.erase(std::remove_if(records.begin(), records.end(), is_known), records.end());
  std::sort(records.begin(), records.end(), [](const CollectiveRecord& one, const CollectiveRecord& other) {
    return place_in_sample(one) < place_in_sample(other);
  });
  records.resize(std::min(records.size(), most));
  std::sort(records.begin(), records.end(), is_older);
  return records;
}

void FlightRecorder::Ring::append(const CollectiveRecord& record) {
  const uint64_t index = num_appended_.load(std::memory_order_relaxed);
  write(index, record);
  num_appended_.store(index + 1, std::memory_order_release);
}

void FlightRecorder::Ring::replace_last(const CollectiveRecord& record) {
  write(num_appended_.load(std::memory_order_relaxed) - 1, record);
}

// Each store of a word is a release: a reader that sees a new word also sees the odd version, or a later one.
void FlightRecorder::Ring::write(uint64_t index, const CollectiveRecord& record) {
  Slot* slot = &slots_[index % capacity_];
  uint64_t words[kWords];
  memcpy(words, &record, sizeof words);
  const uint64_t version = slot->version.load(std::memory_order_relaxed);
  slot->version.store(version + 1, std::memory_order_relaxed);
  for (size_t word = 0; word < kWords; ++word) slot->words[word].store(words[word], std::memory_order_release);
  slot->version.store(version + 2, std::memory_order_release);
}

std::vector<CollectiveRecord> FlightRecorder::Ring::read(size_t most) const {
  std::vector<CollectiveRecord> records;
  const uint64_t end = num_appended_.load(std::memory_order_acquire);
  for (uint64_t index = end - std::min<uint64_t>(end, std::min(capacity_, most)); index < end; ++index) {
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
  std::sort(records.begin(), records.end(), is_older);
  return records;
}

std::string to_json(const std::vector<CollectiveRecord>& records, const EpochClock& clock) {
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
