#include "parameters/server_session.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hvl {

namespace {

constexpr size_t kFetched = 2;                                // payloads that are fetched ahead
constexpr size_t kReturned = 4;                               // pulls whose elements are on their way
constexpr size_t kReplies = 128;                              // batches of replies that are on their way
constexpr uint64_t kBudget = 4 * kPieceBytesMost;             // of a progress()
constexpr uint64_t kMostElementsBytes = 2 * kPieceBytesMost;  // with ranges

bool has_elements(const Command& command) {
  return command.kind == Command::Kind::kPush && (command.part != Part::kValues || has_payload(command.update.rule));
}

}  // namespace

ServerSession::ServerSession(const std::string& client, std::unique_ptr<PeerStream> stream, const MessageKeys* keys,
                             ShardStore* store, std::function<void()> on_ticked)
    : Session(client, std::move(stream), keys), store_(*store), notify_(std::move(on_ticked)) {}

ServerSession::~ServerSession() {
  close();  // before the memory goes
  store_.drop(this);
}

Status ServerSession::on_batch(Bytes batch) {
  num_waiting_bytes_ += batch.size();
  if (num_waiting_bytes_ > kMessageCredit) return wrong("more commands than it has credit for");
  batches_.push_back(std::move(batch));
  return run_commands();
}

Status ServerSession::on_elements(uint64_t number, uint64_t num_bytes) {
  if (num_bytes > kMostElementsBytes) return wrong("more elements than a piece may have");
  if (number <= last_pushed_) return wrong("elements of one number twice, or in another order than their numbers");
  last_pushed_ = number;
  pushed_.push_back(Elements{number, nullptr, num_bytes, false});
  fetch_next();
  return Status();
}

void ServerSession::fetch_next() {
  for (size_t index = 0; index < std::min(kFetched, pushed_.size()); ++index) {
    Elements& elements = pushed_[index];
    if (elements.memory != nullptr) continue;
    elements.memory = store_.buffers().take(elements.num_bytes);
    fetch(elements.number, elements.memory.get());
  }
}

Status ServerSession::on_fetched(uint64_t number) {
  const auto found =
      std::find_if(pushed_.begin(), pushed_.end(), [&](const Elements& each) { return each.number == number; });
  found->is_here = true;
  return run_commands();
}

Status ServerSession::on_sent(uint64_t number) {
  returned_.erase(number);
  return run_commands();
}

void ServerSession::on_ticked(uint64_t number, const Status& status) {
  put(Reply{number, status});
  if (notify_ != nullptr) notify_();
}

Status ServerSession::before_sending() {
  budget_ = kBudget;
  return run_commands();
}

Status ServerSession::run_commands() {
  Status status;
  while (status.ok() && !batches_.empty() && num_batches_under_way() < kReplies && budget_ > 0) {
    if (!reader_.has_value()) reader_.emplace(batches_.front());
    if (!command_.has_value() && !reader_->is_at_end()) {
      status = reader_->read(&command_.emplace(), &inline_payload_);
    }
    if (!status.ok()) return wrong(status.message());
    if (command_.has_value()) {
      bool done = true;
      status = run(*command_, &done);
      if (!done) return status;
      const uint64_t count = std::min(command_->range.count, kBudget / sizeof(double));
      budget_ -= std::min(budget_, kMostCommandBytes + count * sizeof(double));
      command_.reset();
    } else {
      num_waiting_bytes_ -= batches_.front().size();
      give_credit(batches_.front().size());
      reader_.reset();
      batches_.pop_front();
    }
  }
  return status;
}

Status ServerSession::run(const Command& command, bool* done) {
  *done = command.kind != Command::Kind::kPull || returned_.size() < kReturned;
  if (!*done) return Status();
  Elements elements;
  Pushed payload{inline_payload_, command.num_inline};
  const bool is_large = command.num_inline == 0 && (command.num_ranges > 0 || has_elements(command));
  if (is_large && command.range.count > 0) {
    *done = !pushed_.empty() && pushed_.front().is_here;
    if (!*done) return Status();
    elements = std::move(pushed_.front());
    pushed_.pop_front();
    fetch_next();
    if (elements.number != command.number) return wrong("elements in another order than their commands");
    payload = Pushed{elements.memory.get(), elements.num_bytes};
  }
  const bool replies = command.kind != Command::Kind::kPull && command.kind != Command::Kind::kTick &&
                       command.kind != Command::Kind::kLeave;
  Status status = carry_out(command, payload);
  if (replies || !status.ok()) put(Reply{command.number, std::move(status)});
  return Status();
}

Status ServerSession::carry_out(const Command& command, const Pushed& payload) {
  using Kind = Command::Kind;
  switch (command.kind) {
    case Kind::kCreate:
      return store_.create(command.shard, command.dtype, command.range.count, has_left_ ? 0 : command.range.offset,
                           this);
    case Kind::kRemove: return store_.remove(command.shard);
    case Kind::kTick:
      if (has_left_) return Status();  // the client waits for no more replies
      store_.tick(command.shard.array, this, command.number, command.range.offset);
      return Status();
    case Kind::kLeave:
      has_left_ = true;
      store_.drop(this);
      return Status();
    case Kind::kPush:
    case Kind::kPull: break;
  }
  Shard* shard = store_.find(command.shard);
  if (shard == nullptr) {
    return Status(HVL_INVALID_ARGUMENT, "there is no such shard: it has not been created, or it has been removed");
  }
  Pushed elements = payload;
  const Status status = take_ranges(command, *shard, &elements);
  if (!status.ok()) return status;
  return command.kind == Kind::kPush ? push(command, shard, elements) : pull(command, *shard);
}

Status ServerSession::take_ranges(const Command& command, const Shard& shard, Pushed* payload) {
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
    const bool fits = command.num_ranges == 0 || range.count <= kPieceBytesMost;  // the sum does not overflow, either
    if (!fits) return Status(HVL_INVALID_ARGUMENT, "a range of a command has more elements than a piece may have");
    count += range.count;
  }
  if (count == command.range.count) return Status();
  return Status(HVL_INVALID_ARGUMENT, "the ranges of a command have another number of elements than it says");
}

Status ServerSession::push(const Command& command, Shard* shard, Pushed elements) {
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

// The elements are copied, since later pushes may change them before they are sent.
Status ServerSession::pull(const Command& command, const Shard& shard) {
  const uint64_t width = shard.width_of(command.part);
  if (command.range.count > kPieceBytesMost / width) {
    return Status(HVL_INVALID_ARGUMENT, "more elements are asked for than a piece may have");
  }
  const uint64_t num_bytes = command.range.count * width;
  Elements& elements = returned_[command.number];
  elements.memory = store_.buffers().take(num_bytes);
  char* to = elements.memory.get();
  for (const Range& range : ranges_) {
    shard.read(command.part, range, to);
    to += range.count * width;
  }
  send_elements(command.number, elements.memory.get(), num_bytes);
  return Status();
}

}  // namespace hvl
