#include "parameters/command_runner.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace hvl {

namespace {

bool has_elements(const Command& command) {
  return command.kind == Command::Kind::kPush && (command.part != Part::kValues || has_payload(command.update.rule));
}

Status check_dtype(const Command& command, const Shard& shard) {
  if (is_of_counts(command.part) || command.dtype == shard.dtype()) return Status();
  return Status(HVL_MISMATCH, std::string("the array has elements of ") + name_of(command.dtype) +
                                  ", and the shard has elements of " + name_of(shard.dtype()));
}

}  // namespace

CommandRunner::~CommandRunner() {
  end_clocks();
  store_.forget(this);
}

bool CommandRunner::has_large_payload(const Command& command) {
  return command.num_inline == 0 && (command.num_ranges > 0 || has_elements(command)) && command.range.count > 0;
}

uint64_t CommandRunner::cost_of(const Command& command) {
  return kMostCommandBytes + std::min(command.range.count, kTimeSlice) * size_of(command.dtype);
}

void CommandRunner::end_clocks() {
  for (const auto& [array, client] : std::exchange(joined_, {})) store_.drop(array, client);
}

void CommandRunner::on_ticked(uint64_t number, const Status& status) {
  output_.reply(Reply{number, status});
  output_.notify();
}

void CommandRunner::carry_out(const Command& command, const Pushed& payload) {
  if (has_left_) return;  // the client waits for nothing
  Status status;
  switch (command.kind) {
    case Command::Kind::kLeave: has_left_ = true; return end_clocks();
    case Command::Kind::kTick:
      return store_.tick(command.shard.array, Ticker{command.client, this, command.number}, command.range.offset);
    case Command::Kind::kPull:
      status = pull(command, payload);
      if (status.ok()) return;
      break;
    case Command::Kind::kPush: status = push(command, payload); break;
    case Command::Kind::kCreate: status = create(command); break;
    case Command::Kind::kRemove: status = store_.remove(command.shard); break;
  }
  output_.reply(Reply{command.number, status});
}

Status CommandRunner::create(const Command& command) {
  const uint64_t num_clients = command.range.offset;
  const Status status = store_.create(command.shard, command.dtype, command.range.count, num_clients, command.client);
  if (status.ok() && num_clients > 0) joined_.emplace(command.shard.array, command.client);
  return status;
}

Status CommandRunner::push(const Command& command, Pushed payload) {
  Shard* shard = nullptr;
  Status status = store_.find(command.shard, &shard);
  if (status.ok()) status = check_dtype(command, *shard);
  if (status.ok()) status = take_ranges(command, *shard, &payload);
  return status.ok() ? apply(command, shard, payload) : status;
}

// The elements are copied, since later pushes may change them before they are sent.
Status CommandRunner::pull(const Command& command, Pushed payload) {
  Shard* shard = nullptr;
  Status status = store_.find(command.shard, &shard);
  if (status.ok()) status = check_dtype(command, *shard);
  if (status.ok()) status = take_ranges(command, *shard, &payload);
  if (!status.ok()) return status;
  const uint64_t width = shard->width_of(command.part);
  if (command.range.count > kMostPayloadBytes / width) {
    return Status(HVL_INVALID_ARGUMENT, "more elements are asked for than a command may have");
  }
  BufferPool::Pointer memory;
  const uint64_t num_bytes = command.range.count * width;
  const bool is_plain = command.address != 0 && command.part == Part::kValues && command.num_ranges == 0;
  const char* values = shard->values() + ranges_.front().offset * width;
  if (!is_plain || !output_.copy_to_client(command, values, num_bytes)) {
    memory = output_.memory_for(command.number, num_bytes);
    char* to = memory.get();
    for (const Range& range : ranges_) {
      shard->read(command.part, range, to);
      to += range.count * width;
    }
  }
  output_.return_elements(command.number, std::move(memory), num_bytes);
  return status;
}

Status CommandRunner::take_ranges(const Command& command, const Shard& shard, Pushed* payload) {
  ranges_.assign(1, command.range);
  if (command.num_ranges > 0) {
    const uint64_t num_bytes = command.num_ranges * sizeof(Range);
    if (payload->num_bytes < num_bytes) return Status(HVL_INVALID_ARGUMENT, "the ranges of a command are cut off");
    ranges_.resize(command.num_ranges);
    std::memcpy(ranges_.data(), payload->bytes, num_bytes);
    payload->bytes += num_bytes;
    payload->num_bytes -= num_bytes;
  }
  uint64_t count = 0;
  for (const Range& range : ranges_) {
    const Status status = shard.check_range(range, command.part);
    if (!status.ok()) return status;
    const bool fits = command.num_ranges == 0 || range.count <= kMostPayloadBytes;  // the sum does not overflow, either
    if (!fits) return Status(HVL_INVALID_ARGUMENT, "a range of a command has more elements than a command may have");
    count += range.count;
  }
  if (count == command.range.count) return Status();
  return Status(HVL_INVALID_ARGUMENT, "the ranges of a command have another number of elements than it says");
}

Status CommandRunner::apply(const Command& command, Shard* shard, Pushed elements) {
  const uint64_t count = has_elements(command) ? command.range.count : 0, width = shard->width_of(command.part);
  const bool is_converted = command.format != HVL_PAYLOAD_FULL;
  const bool can_convert = shard->dtype() == HVL_FLOAT32 || shard->dtype() == HVL_FLOAT64;
  if (is_converted && (!can_convert || command.part != Part::kValues)) {
    return Status(HVL_INVALID_ARGUMENT, "only values of float32 and float64 are sent as numbers of fewer bits");
  }
  const uint64_t expected = is_converted ? num_bytes_of(command.format, shard->dtype(), count) : count * width;
  if (elements.num_bytes != expected) {
    return Status(HVL_MISMATCH, std::to_string(elements.num_bytes) + " bytes were pushed for " + std::to_string(count) +
                                    " elements of " + name_of(shard->dtype()));
  }
  BufferPool::Pointer widened;
  if (is_converted) {
    widened = store_.buffers().take(count * width);
    widen(command.format, shard->dtype(), elements.bytes, count, widened.get());
    elements.bytes = widened.get();
  }
  const char* bytes = has_elements(command) ? elements.bytes : nullptr;
  if (command.part == Part::kValues) {
    return shard->apply(command.update, ranges_, bytes, store_.user_rules());
  }
  for (const Range& range : ranges_) {
    shard->write(command.part, range, bytes);
    bytes += range.count * width;
  }
  return Status();
}

}  // namespace hvl
