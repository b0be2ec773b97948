#include "parameters/client_array.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "parameters/clocks.h"

namespace hvl {

namespace {

constexpr uintptr_t kLowestAddress = 1 << 16;  // below it there is no memory
constexpr uint64_t kMostElements = UINT64_C(1) << 56;

Status invalid(const std::string& text) { return Status(HVL_INVALID_ARGUMENT, text); }

Status check_memory(const void* elements, bool is_needed) {
  if (!is_needed || reinterpret_cast<uintptr_t>(elements) >= kLowestAddress) return Status();
  return invalid("there is no memory for the elements");
}

uint64_t blocks_of(uint64_t count) { return (count + kBlockElements - 1) / kBlockElements; }

template <class T>
void add(char* to, const char* from, double factor, uint64_t count) {
  auto* sums = reinterpret_cast<T*>(to);
  const auto* numbers = reinterpret_cast<const T*>(from);
  for (uint64_t i = 0; i < count; ++i) sums[i] += static_cast<T>(factor * static_cast<double>(numbers[i]));
}

void add_to(char* to, DataType dtype, const char* from, double factor, uint64_t count) {
  dtype == HVL_FLOAT32 ? add<float>(to, from, factor, count) : add<double>(to, from, factor, count);
}

// True if the rule adds the pushed elements, times a factor, to the values.
bool find_factor(const Update& update, double* factor) {
  *factor = 1;
  if (update.rule == Rule::kScaleAdd) *factor = update.arguments[0];
  if (update.rule == Rule::kSgd) *factor = -update.arguments[0];
  return update.rule == Rule::kAdd || update.rule == Rule::kScaleAdd || update.rule == Rule::kSgd;
}

}  // namespace

Status ClientArray::make(const hvl_parameters_array_config& config, std::unique_ptr<ClientArray>* array) {
  if (config.dtype < 0 || config.dtype >= kNumDataTypes) return invalid("an array has an unknown dtype");
  if (config.num_shards < 1) return invalid("an array has no shards");
  if (config.num_clients < 0) return invalid("an array has a negative number of clients");
  std::unique_ptr<ClientArray> made(new ClientArray);
  made->id_ = config.id;
  made->dtype_ = static_cast<DataType>(config.dtype);
  made->num_clients_ = static_cast<uint64_t>(config.num_clients);
  for (int32_t index = 0; index < config.num_shards; ++index) {
    const hvl_parameters_shard& shard = config.shards[index];
    if (shard.count < 0 || static_cast<uint64_t>(shard.count) > kMostElements - made->count_) {
      return invalid("shard " + std::to_string(index) + " of an array has " + std::to_string(shard.count) +
                     " elements");
    }
    made->shards_.push_back(ShardRange{shard.server, made->count_, static_cast<uint64_t>(shard.count)});
    made->count_ += static_cast<uint64_t>(shard.count);
  }
  std::random_device random;
  made->client_ = uint64_t{random()} << 32 | random() | 1;
  *array = std::move(made);
  return Status();
}

ClientCommand* ClientArray::add_command(Command::Kind kind, size_t shard, ClientRequest* request) const {
  ClientCommand& command = request->commands.emplace_back();
  command.server = shards_[shard].server;
  command.kind = kind;
  command.dtype = dtype_;
  command.shard = ShardId{id_, static_cast<uint32_t>(shard)};
  command.client = client_;
  return &command;
}

// The commands end where blocks of the shard do: so a block is updated at once.
void ClientArray::add_commands(const Command& command, size_t shard, Range items, char* memory,
                               ClientRequest* request) const {
  const uint64_t width = is_of_counts(command.part) ? sizeof(uint64_t) : size_of(dtype_);
  const uint64_t most = std::max(kBlockElements, kUsualPayloadBytes / width);
  while (items.count > 0) {
    const uint64_t count = std::min(items.count, most - items.offset % most);
    ClientCommand* added = add_command(command.kind, shard, request);
    added->part = command.part;
    added->update = command.update;
    added->range = Range{items.offset, count};
    if (command.kind == Command::Kind::kPull) {
      added->received = memory;
      added->num_received = count * width;
    } else if (memory != nullptr) {
      added->sent = memory;
      added->num_sent = count * width;
    }
    if (memory != nullptr) memory += count * width;
    items.offset += count;
    items.count -= count;
  }
}

template <typename Function>
void ClientArray::for_each_shard(const Range& elements, Function&& function) const {
  const auto starts_behind = [](uint64_t offset, const ShardRange& shard) { return offset < shard.begin; };
  const auto first = std::upper_bound(shards_.begin(), shards_.end(), elements.offset, starts_behind) - 1;
  uint64_t done = 0;
  for (auto shard = first; done < elements.count; ++shard) {
    const uint64_t offset = elements.offset + done - shard->begin;
    const uint64_t count = std::min(elements.count - done, shard->count - offset);
    if (count > 0) function(static_cast<size_t>(shard - shards_.begin()), Range{offset, count}, done);
    done += count;
  }
}

Status ClientArray::check_elements(int64_t offset, int64_t count, bool has_memory, const void* elements) const {
  const bool fits = offset >= 0 && count >= 0 && static_cast<uint64_t>(offset) <= count_ &&
                    static_cast<uint64_t>(count) <= count_ - static_cast<uint64_t>(offset);
  if (fits) return check_memory(elements, has_memory && count > 0);
  return invalid(std::to_string(count) + " elements from " + std::to_string(offset) + " on are not in an array of " +
                 std::to_string(count_));
}

Status ClientArray::check_rows(const Rows& rows, bool has_memory, const void* elements) const {
  if (rows.length < 1 || rows.count < 0) return invalid("rows have the length " + std::to_string(rows.length));
  const auto num_rows = static_cast<int64_t>(count_ / static_cast<uint64_t>(rows.length));
  for (int64_t row = 0; row < rows.count; ++row) {
    if (rows.indices[row] >= 0 && rows.indices[row] < num_rows) continue;
    return invalid("row " + std::to_string(rows.indices[row]) + " is not in an array of " + std::to_string(num_rows) +
                   " rows");
  }
  return check_memory(elements, has_memory && rows.count > 0);
}

Status ClientArray::check_update(const Update& update, const Conversion& conversion) const {
  const Status status = check(update, dtype_);
  if (!status.ok() || conversion.payload == HVL_PAYLOAD_FULL) return status;
  if (dtype_ == HVL_FLOAT32 || dtype_ == HVL_FLOAT64) return Status();
  return invalid(std::string("only float32 and float64 are sent as numbers of fewer bits, and the parameters are ") +
                 kDataTypeNames[dtype_]);
}

Status ClientArray::create(ClientRequest* request) const {
  for (size_t shard = 0; shard < shards_.size(); ++shard) {
    ClientCommand* command = add_command(Command::Kind::kCreate, shard, request);
    command->range = Range{shard == 0 ? num_clients_ : 0, shards_[shard].count};
  }
  return Status();
}

Status ClientArray::remove(ClientRequest* request) const {
  for (size_t shard = 0; shard < shards_.size(); ++shard) add_command(Command::Kind::kRemove, shard, request);
  return Status();
}

Status ClientArray::tick(int64_t staleness, ClientRequest* request) const {
  if (num_clients_ == 0) return invalid("the array has no clocks: its number of clients is 0");
  static_assert(static_cast<uint64_t>(-1) == Clocks::kLeaves);
  if (staleness < -1) return invalid("a staleness of " + std::to_string(staleness) + " is negative");
  add_command(Command::Kind::kTick, 0, request)->range.offset = static_cast<uint64_t>(staleness);
  return Status();
}

Status ClientArray::send(const Update& update, const Conversion& conversion, int64_t offset, int64_t count,
                         const char* elements, ClientRequest* request) {
  const bool has_elements = has_payload(update.rule);
  Status status = check_update(update, conversion);
  if (status.ok()) status = check_elements(offset, count, has_elements, elements);
  if (!status.ok()) return status;
  Command command;
  command.update = update;
  const Range range{static_cast<uint64_t>(offset), static_cast<uint64_t>(count)};
  for_each_shard(range, [&](size_t shard, const Range& in_shard, uint64_t in_front) {
    char* memory = has_elements ? const_cast<char*>(elements) + in_front * size_of(dtype_) : nullptr;
    add_commands(command, shard, in_shard, memory, request);
  });
  if (conversion.payload == HVL_PAYLOAD_FULL || !has_elements) return status;
  for (ClientCommand& added : request->commands) {
    CommandRanges ranges;
    ranges.in_array.push_back(Range{shards_[added.shard.index].begin + added.range.offset, added.range.count});
    pack(conversion, ranges, added.sent, &added);
  }
  return status;
}

Status ClientArray::receive(int64_t offset, int64_t count, char* elements, ClientRequest* request) const {
  const Status status = check_elements(offset, count, true, elements);
  if (!status.ok()) return status;
  Command command;
  command.kind = Command::Kind::kPull;
  const Range range{static_cast<uint64_t>(offset), static_cast<uint64_t>(count)};
  for_each_shard(range, [&](size_t shard, const Range& in_shard, uint64_t in_front) {
    add_commands(command, shard, in_shard, elements + in_front * size_of(dtype_), request);
  });
  return status;
}

template <typename Function>
void ClientArray::for_each_command(const Rows& rows, Function&& function) const {
  const uint64_t width = size_of(dtype_), length = static_cast<uint64_t>(rows.length);
  std::vector<CommandRanges> next(shards_.size());
  const auto add = [&](size_t shard, Range in_shard, uint64_t in_rows) {
    while (in_shard.count > 0) {
      CommandRanges& ranges = next[shard];
      const uint64_t room = (kMostPayloadBytes - ranges.num_bytes - sizeof(Range)) / width;
      const uint64_t count = std::min(in_shard.count, room);
      // A row is cut only if it does not fit into a command.
      if (count == in_shard.count || ranges.in_shard.empty()) {
        ranges.in_shard.push_back(Range{in_shard.offset, count});
        ranges.in_array.push_back(Range{shards_[shard].begin + in_shard.offset, count});
        ranges.in_rows.push_back(Range{in_rows, count});
        ranges.num_bytes += sizeof(Range) + count * width;
        in_shard.offset += count;
        in_shard.count -= count;
        in_rows += count;
      }
      if (in_shard.count > 0 || ranges.num_bytes + sizeof(Range) + width > kMostPayloadBytes) {
        function(shard, std::exchange(ranges, CommandRanges()));
      }
    }
  };
  for (int64_t row = 0; row < rows.count; ++row) {
    const Range elements{static_cast<uint64_t>(rows.indices[row]) * length, length};
    for_each_shard(elements, [&](size_t shard, const Range& in_shard, uint64_t in_front) {
      add(shard, in_shard, static_cast<uint64_t>(row) * length + in_front);
    });
  }
  for (size_t shard = 0; shard < next.size(); ++shard) {
    if (!next[shard].in_shard.empty()) function(shard, next[shard]);
  }
}

Status ClientArray::send_rows(const Update& update, const Conversion& conversion, const Rows& rows,
                              const char* elements, ClientRequest* request) {
  const bool has_elements = has_payload(update.rule);
  Status status = check_update(update, conversion);
  if (status.ok()) status = check_rows(rows, has_elements, elements);
  if (!status.ok()) return status;
  for_each_command(rows, [&](size_t shard, const CommandRanges& ranges) {
    ClientCommand* command = add_command(Command::Kind::kPush, shard, request);
    command->update = update;
    pack(conversion, ranges, has_elements ? elements : nullptr, command);
  });
  return status;
}

Status ClientArray::receive_rows(const Rows& rows, char* elements, ClientRequest* request) const {
  const Status status = check_rows(rows, true, elements);
  if (!status.ok()) return status;
  const uint64_t width = size_of(dtype_);
  for_each_command(rows, [&](size_t shard, const CommandRanges& ranges) {
    ClientCommand* command = add_command(Command::Kind::kPull, shard, request);
    const uint64_t num_sent = ranges.in_shard.size() * sizeof(Range);
    for (const Range& each : ranges.in_rows) {
      command->range.count += each.count;
      command->destinations.push_back(iovec{elements + each.offset * width, each.count * width});
    }
    command->num_received = command->range.count * width;
    command->memory.reset(new char[num_sent + command->num_received]);
    std::memcpy(command->memory.get(), ranges.in_shard.data(), num_sent);
    command->num_ranges = static_cast<uint32_t>(ranges.in_shard.size());
    command->sent = command->memory.get();
    command->num_sent = num_sent;
    command->received = command->memory.get() + num_sent;
  });
  return status;
}

Status ClientArray::move_state(Command::Kind kind, int32_t state, char* memory, ClientRequest* request) const {
  const int32_t last = kind == Command::Kind::kPull ? HVL_UPDATES : HVL_COUNTERS;
  if (state < HVL_SLOT_0 || state > last) return invalid("there is no such state of an array");
  const Status status = check_memory(memory, count_ > 0);
  if (!status.ok()) return status;
  Command command;
  command.kind = kind;
  command.part = static_cast<Part>(state + 1);
  static_assert(static_cast<int>(Part::kSlot0) == HVL_SLOT_0 + 1 && static_cast<int>(Part::kUpdates) == HVL_UPDATES + 1,
                "parts are in the order of states");
  command.update.rule = Rule::kCopy;
  for (size_t shard = 0; shard < shards_.size(); ++shard) {
    uint64_t count = shards_[shard].count;
    if (is_of_counts(command.part)) count = blocks_of(count);
    if (command.part == Part::kUpdates) count = std::min<uint64_t>(count, 1);
    add_commands(command, shard, Range{0, count}, memory, request);
    memory += count * (is_of_counts(command.part) ? sizeof(uint64_t) : size_of(dtype_));
  }
  return status;
}

void ClientArray::pack(const Conversion& conversion, const CommandRanges& ranges, const char* elements,
                       ClientCommand* command) {
  const uint64_t width = size_of(dtype_), num_range_bytes = ranges.in_shard.size() * sizeof(Range);
  uint64_t count = 0;
  for (const Range& each : ranges.in_array) count += each.count;
  const uint64_t num_element_bytes = elements == nullptr ? 0 : num_bytes_of(conversion.payload, dtype_, count);
  std::unique_ptr<char[]> memory(new char[num_range_bytes + num_element_bytes]);
  if (num_range_bytes > 0) std::memcpy(memory.get(), ranges.in_shard.data(), num_range_bytes);
  if (elements != nullptr) {
    std::unique_ptr<char[]> gathered;
    if (!ranges.in_rows.empty()) {
      gathered.reset(new char[count * width]);
      char* to = gathered.get();
      for (const Range& each : ranges.in_rows) {
        std::memcpy(to, elements + each.offset * width, each.count * width);
        to += each.count * width;
      }
      elements = gathered.get();
    }
    convert(command->update, conversion, ranges.in_array, elements, count, memory.get() + num_range_bytes);
    command->format = conversion.payload;
  }
  command->num_ranges = static_cast<uint32_t>(ranges.in_shard.size());
  if (command->num_ranges > 0) command->range = Range{0, count};
  command->memory = std::move(memory);
  command->sent = command->memory.get();
  command->num_sent = num_range_bytes + num_element_bytes;
}

// An error that is fed back is taken out of the residual: it is added once to elements that are sent twice.
void ClientArray::convert(const Update& update, const Conversion& conversion, const std::vector<Range>& in_array,
                          const char* elements, uint64_t count, char* converted) {
  const uint64_t width = size_of(dtype_);
  if (conversion.payload == HVL_PAYLOAD_FULL) {
    std::memcpy(converted, elements, count * width);
    return;
  }
  double factor = 1;
  const bool adds = find_factor(update, &factor);
  if (!conversion.feeds_errors_back || !std::isfinite(1 / factor)) {  // a factor of 0: no error has an effect
    return narrow(conversion.payload, dtype_, elements, count, nullptr, converted);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<char>& residual = residuals_[{adds ? Rule::kAdd : update.rule, update.name}];
  if (residual.empty()) residual.resize(count_ * width);
  std::vector<char> errors(count * width);
  char* next = errors.data();
  for (const Range& each : in_array) {
    char* kept = residual.data() + each.offset * width;
    add_to(next, dtype_, kept, 1 / factor, each.count);
    std::memset(kept, 0, each.count * width);
    next += each.count * width;
  }
  narrow(conversion.payload, dtype_, elements, count, errors.data(), converted);
  next = errors.data();
  for (const Range& each : in_array) {
    add_to(residual.data() + each.offset * width, dtype_, next, factor, each.count);
    next += each.count * width;
  }
}

}  // namespace hvl
