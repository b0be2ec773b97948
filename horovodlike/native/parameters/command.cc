#include "parameters/command.h"

#include <algorithm>
#include <cstring>

namespace hvl {

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "commands need byte swaps here");

struct WireCommand {
  uint8_t kind;
  uint8_t part;
  uint8_t format;
  uint8_t dtype;
  uint8_t rule;
  uint8_t num_arguments;
  uint8_t name_bytes;  // the name follows the command
  uint8_t unused[5];
  uint32_t shard;
  uint32_t num_ranges;
  uint32_t num_inline;
  uint64_t array;
  uint64_t number;
  uint64_t client;
  uint64_t offset;
  uint64_t count;
  uint64_t address;
  double arguments[kMostRuleArguments];
};
static_assert(sizeof(WireCommand) == 104, "a command has no gaps");
static_assert(sizeof(WireCommand) + HVL_PARAMETERS_NAME_BYTES == kMostCommandBytes, "the name is the longest");

struct WireReply {
  uint64_t number;
  uint32_t code;
  uint32_t text_bytes;
};
static_assert(sizeof(WireReply) == 16, "a reply has no gaps");

constexpr uint32_t kMostTextBytes = 4096;

void append_bytes(const void* from, uint64_t num_bytes, Bytes* batch) {
  const char* bytes = static_cast<const char*>(from);
  batch->insert(batch->end(), bytes, bytes + num_bytes);
}

// Commands, names and payloads begin at multiples of 8 bytes, so that elements are aligned.
constexpr uint64_t kAligned = 8;

void pad(Bytes* batch) { batch->resize(round_up(batch->size(), kAligned)); }

Status wrong(const char* what) { return Status(HVL_JOB_BROKEN, std::string("Protocol error: ") + what); }

template <typename Enumeration>
bool is_at_most(uint8_t value, Enumeration last) {
  return value <= static_cast<uint8_t>(last);
}

bool is_valid(const WireCommand& wire) {
  const bool is_named = wire.rule == static_cast<uint8_t>(Rule::kNamed);
  return wire.kind > 0 && is_at_most(wire.kind, Command::Kind::kLeave) && is_at_most(wire.part, Part::kUpdates) &&
         is_at_most(wire.format, HVL_PAYLOAD_INT8) && wire.dtype < kNumDataTypes &&
         is_at_most(wire.rule, Rule::kNamed) && wire.num_arguments <= kMostRuleArguments &&
         wire.name_bytes <= HVL_PARAMETERS_NAME_BYTES && (wire.name_bytes > 0) == is_named && wire.number > 0 &&
         wire.number <= INT64_MAX && wire.num_inline <= kInlineBytes &&
         wire.num_ranges <= kMostPayloadBytes / sizeof(Range);
}

}  // namespace

void append(const Command& command, const char* payload, Bytes* batch) {
  const Update& update = command.update;
  WireCommand wire{};
  wire.kind = static_cast<uint8_t>(command.kind);
  wire.part = static_cast<uint8_t>(command.part);
  wire.format = static_cast<uint8_t>(command.format);
  wire.dtype = static_cast<uint8_t>(command.dtype);
  wire.rule = static_cast<uint8_t>(update.rule);
  wire.num_arguments = static_cast<uint8_t>(update.num_arguments);
  wire.name_bytes = static_cast<uint8_t>(update.name.size());
  wire.shard = command.shard.index;
  wire.num_ranges = command.num_ranges;
  wire.num_inline = command.num_inline;
  wire.array = command.shard.array;
  wire.client = command.client;
  wire.number = command.number;
  wire.offset = command.range.offset;
  wire.count = command.range.count;
  wire.address = command.address;
  std::copy(std::begin(update.arguments), std::end(update.arguments), wire.arguments);
  append_bytes(&wire, sizeof wire, batch);
  append_bytes(update.name.data(), update.name.size(), batch);
  pad(batch);
  append_bytes(payload, command.num_inline, batch);
  pad(batch);
}

void append(const Reply& reply, Bytes* batch) {
  const std::string& text = reply.status.message();
  const auto text_bytes = static_cast<uint32_t>(std::min<size_t>(text.size(), kMostTextBytes));
  const WireReply wire{reply.number, static_cast<uint32_t>(reply.status.code()), text_bytes};
  append_bytes(&wire, sizeof wire, batch);
  append_bytes(text.data(), text_bytes, batch);
}

bool BatchReader::take(void* to, uint64_t num_bytes) {
  if (num_bytes > static_cast<uint64_t>(end_ - next_)) return false;
  std::memcpy(to, next_, num_bytes);
  next_ += num_bytes;
  return true;
}

Status BatchReader::read(Command* command, const char** payload) {
  WireCommand wire;
  if (!take(&wire, sizeof wire)) return wrong("a command is cut off");
  if (!is_valid(wire)) return wrong("a command has a field that is out of range");
  const uint64_t name_bytes = round_up(wire.name_bytes, kAligned), payload_bytes = round_up(wire.num_inline, kAligned);
  if (name_bytes + payload_bytes > static_cast<uint64_t>(end_ - next_)) {
    return wrong("the elements of a command are cut off");
  }
  command->kind = static_cast<Command::Kind>(wire.kind);
  command->part = static_cast<Part>(wire.part);
  command->format = static_cast<Payload>(wire.format);
  command->dtype = static_cast<DataType>(wire.dtype);
  command->update.rule = static_cast<Rule>(wire.rule);
  command->update.num_arguments = wire.num_arguments;
  std::copy(std::begin(wire.arguments), std::end(wire.arguments), command->update.arguments);
  command->update.name.assign(next_, wire.name_bytes);
  next_ += name_bytes;
  command->shard = ShardId{wire.array, wire.shard};
  command->number = wire.number;
  command->client = wire.client;
  command->range = Range{wire.offset, wire.count};
  command->num_ranges = wire.num_ranges;
  command->address = wire.address;
  command->num_inline = wire.num_inline;
  *payload = next_;
  next_ += payload_bytes;
  return Status();
}

Status BatchReader::read(Reply* reply) {
  WireReply wire;
  if (!take(&wire, sizeof wire)) return wrong("a reply is cut off");
  if (wire.code > HVL_UNKNOWN_HANDLE) return wrong("a reply has an unknown code");
  if (wire.text_bytes > kMostTextBytes || wire.text_bytes > static_cast<uint64_t>(end_ - next_)) {
    return wrong("the text of a reply is cut off");
  }
  reply->number = wire.number;
  reply->status = Status(static_cast<hvl_status>(wire.code), std::string(next_, wire.text_bytes));
  next_ += wire.text_bytes;
  return Status();
}

}  // namespace hvl
