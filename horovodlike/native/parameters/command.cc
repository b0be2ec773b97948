#include "parameters/command.h"

#include <algorithm>
#include <cstring>

namespace hvl {

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "commands need byte swaps here");

struct WireCommand {
  uint8_t kind;
  uint8_t rule;
  uint16_t zeros;
  uint32_t shard;
  uint64_t number;
  uint64_t offset;
  uint64_t count;
  uint64_t num_inline;
  double arguments[kMostRuleArguments];
};
static_assert(sizeof(WireCommand) == kCommandBytes, "a command has no gaps");

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

Status wrong(const char* what) { return Status(HVL_JOB_BROKEN, std::string("Protocol error: ") + what); }

bool is_valid(const WireCommand& wire) {
  const bool is_known = wire.kind == static_cast<uint8_t>(Command::Kind::kPush) ||
                        wire.kind == static_cast<uint8_t>(Command::Kind::kPull);
  return is_known && wire.rule <= static_cast<uint8_t>(Rule::kAdam) && wire.zeros == 0 && wire.number > 0 &&
         wire.number <= INT64_MAX && wire.num_inline <= kInlineBytes;
}

}  // namespace

void append(const Command& command, const char* elements, Bytes* batch) {
  WireCommand wire{static_cast<uint8_t>(command.kind),
                   static_cast<uint8_t>(command.update.rule),
                   0,
                   command.shard,
                   command.number,
                   command.offset,
                   command.count,
                   command.num_inline,
                   {}};
  std::copy(std::begin(command.update.arguments), std::end(command.update.arguments), wire.arguments);
  append_bytes(&wire, sizeof wire, batch);
  append_bytes(elements, command.num_inline, batch);
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

Status BatchReader::read(Command* command, const char** elements) {
  WireCommand wire;
  if (!take(&wire, sizeof wire)) return wrong("a command is cut off");
  if (!is_valid(wire)) return wrong("a command has a field that is out of range");
  if (wire.num_inline > static_cast<uint64_t>(end_ - next_)) return wrong("the elements of a command are cut off");
  command->kind = static_cast<Command::Kind>(wire.kind);
  command->update.rule = static_cast<Rule>(wire.rule);
  std::copy(std::begin(wire.arguments), std::end(wire.arguments), command->update.arguments);
  command->shard = wire.shard;
  command->number = wire.number;
  command->offset = wire.offset;
  command->count = wire.count;
  command->num_inline = wire.num_inline;
  *elements = next_;
  next_ += wire.num_inline;
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
