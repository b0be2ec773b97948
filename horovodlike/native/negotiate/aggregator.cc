#include "negotiate/aggregator.h"

#include <algorithm>
#include <list>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "negotiate/coordinator.h"
#include "negotiate/partial_tensor.h"

namespace hvl {
namespace {

constexpr uint64_t kNotHeld = 0;  // the deadline of a tensor of which no message is held

}  // namespace

struct Aggregator::State {
  using Tensors = std::list<PartialTensor>;
  using TensorAt = Tensors::iterator;

  struct ProcessSet {
    RankSet ranks;   // the members among AggregatorOptions::ranks
    RankSet joined;  // members of `ranks` that have joined: no tensor waits for them
    std::unordered_map<std::string, TensorAt> names;
  };

  explicit State(AggregatorOptions given) : options(std::move(given)) { process_sets[0].ranks = options.ranks; }

  void on_ready(const RankSet& ranks, TensorId id, const Times& times);
  void on_request(const Message& message, const Times& times);
  void pass_on(const Message& message, const Times& times) { outgoing.push_back({message, times}); }
  void prepare(TensorAt tensor, Kind kind, const RankSet& ranks);
  bool is_complete(const PartialTensor& tensor, const ProcessSet& set) const;
  void hold_or_release(TensorAt tensor, const ProcessSet& set, const Times& times);
  void hold(TensorAt tensor, uint64_t deadline);
  void release(TensorAt tensor);
  template <typename F>
  void release_if(F condition);
  void settle(TensorAt tensor);
  TensorAt find_or_add(ProcessSet* set, const Signature& signature);

  void define(const Record& record);
  void execute(TensorId id, const RankSet& absent);
  void fail(const Record& record);
  void evict(TensorId id);
  void answer(TensorAt tensor, const RankSet& absent);
  void forget_id(TensorAt tensor);
  void forget_if_unused(TensorAt tensor);
  void remove_process_set(int32_t process_set);
  void end();

  ProcessSet* find_process_set(int32_t process_set) {
    const auto found = process_sets.find(process_set);
    return found == process_sets.end() ? nullptr : &found->second;
  }

  AggregatorOptions options;
  std::map<int32_t, ProcessSet> process_sets;
  std::unordered_map<TensorId, TensorAt> ids;
  Tensors idle;  // no message about these is held
  Tensors held;  // the earliest deadline first
  std::vector<Outgoing> outgoing;
  bool is_over = false;  // a rank has left, or the log has ended: the coordinator ignores all later messages
};

// ---- Messages -------------------------------------------------------------------------------------------------------

// Passes on ids that are no longer defined, and invalid messages: the coordinator decides on them.
void Aggregator::State::on_ready(const RankSet& ranks, TensorId id, const Times& times) {
  const auto known = ids.find(id);
  ProcessSet* set = known == ids.end() ? nullptr : find_process_set(known->second->process_set);
  if (set == nullptr || !set->ranks.contains(ranks)) {
    return append_ready(id, ranks, times, &outgoing);
  }
  const TensorAt tensor = known->second;
  prepare(tensor, tensor->kind, ranks);
  tensor->add_ready(ranks, times);
  tensor->kind == HVL_JOIN ? release(tensor) : hold_or_release(tensor, *set, times);
}

void Aggregator::State::on_request(const Message& message, const Times& times) {
  const Signature& signature = message.signature;
  ProcessSet* set = find_process_set(signature.process_set);
  if (set == nullptr || !set->ranks.contains(message.ranks)) {
    return pass_on(message, times);
  }
  const TensorAt tensor = find_or_add(set, signature);
  prepare(tensor, signature.kind, message.ranks);
  tensor->add_request(message, times);
  signature.kind == HVL_JOIN ? release(tensor) : hold_or_release(tensor, *set, times);
}

// Releases the messages that must be sent before the request of `ranks` for an operation of that kind.
void Aggregator::State::prepare(TensorAt tensor, Kind kind, const RankSet& ranks) {
  // A rank that repeats a request has received an answer to the first one earlier than this host, for example when the
  // process set is removed.
  if (tensor->holds_any_of(ranks)) release(tensor);
  // Tensors that a rank has ready on a set are executed before the set is removed; the coordinator orders the changes
  // themselves.
  if (changes_process_sets(kind))
    release_if([](const PartialTensor& held) { return !changes_process_sets(held.kind); });
  if (kind != HVL_JOIN) return;
  // Tensors that a rank has ready when it joins are executed with it, and tensors for which only this rank was missing
  // are complete.
  const int32_t process_set = tensor->process_set;
  release_if([&](const PartialTensor& held) { return held.process_set == process_set; });
  tensor->joined.add(ranks);
  find_process_set(process_set)->joined.add(ranks);
}

// True if all ranks of this part of the tree for which the coordinator can wait have announced the tensor.
bool Aggregator::State::is_complete(const PartialTensor& tensor, const ProcessSet& set) const {
  if (set.joined.empty()) return tensor.is_announced_by(set.ranks.size());
  RankSet needed = set.ranks;
  needed.remove(set.joined);
  return tensor.announcers().contains(needed);
}

void Aggregator::State::hold_or_release(TensorAt tensor, const ProcessSet& set, const Times& times) {
  if (is_complete(*tensor, set)) return release(tensor);
  hold(tensor, std::max(kNotHeld + 1, times.since + options.patience));
}

void Aggregator::State::hold(TensorAt tensor, uint64_t deadline) {
  if (tensor->deadline != kNotHeld && tensor->deadline <= deadline) return;
  // Deadlines arrive nearly in order.
  auto place = tensor->deadline != kNotHeld ? tensor : held.end();
  while (place != held.begin() && std::prev(place)->deadline > deadline) --place;
  held.splice(place, tensor->deadline != kNotHeld ? held : idle, tensor);
  tensor->deadline = deadline;
}

void Aggregator::State::release(TensorAt tensor) {
  tensor->release(&outgoing);
  settle(tensor);
}

template <typename F>
void Aggregator::State::release_if(F condition) {
  for (TensorAt tensor = held.begin(); tensor != held.end();) {
    const TensorAt next = std::next(tensor);
    if (condition(*tensor)) release(tensor);
    tensor = next;
  }
}

// Moves a tensor about which no message is held any more to the idle ones.
void Aggregator::State::settle(TensorAt tensor) {
  if (!tensor->is_empty() || tensor->deadline == kNotHeld) return;
  idle.splice(idle.end(), held, tensor);
  tensor->deadline = kNotHeld;
}

Aggregator::State::TensorAt Aggregator::State::find_or_add(ProcessSet* set, const Signature& signature) {
  const auto known = set->names.find(signature.name);
  if (known != set->names.end()) return known->second;
  const TensorAt tensor = idle.emplace(idle.end());
  tensor->name = signature.name;
  tensor->process_set = signature.process_set;
  tensor->kind = signature.kind;
  set->names.emplace(signature.name, tensor);
  return tensor;
}

// ---- The log --------------------------------------------------------------------------------------------------------

// A tensor that changes while all ranks take part keeps its id, and no message about it is held then. A tensor that
// changes without some ranks is given another id; these ranks have joined, so none of their messages is held either,
// and they announce the tensor again.
void Aggregator::State::define(const Record& record) {
  ProcessSet* set = find_process_set(record.signature.process_set);
  if (set == nullptr) return;
  const TensorAt tensor = find_or_add(set, record.signature);
  if (tensor->id != record.id) {
    forget_id(tensor);
    tensor->id = record.id;
    ids[record.id] = tensor;
  }
  tensor->kind = record.signature.kind;
  if (changes_process_sets(tensor->kind)) tensor->arguments = record.signature.arguments;
}

void Aggregator::State::execute(TensorId id, const RankSet& absent) {
  const auto known = ids.find(id);
  if (known == ids.end()) return;
  const TensorAt tensor = known->second;
  answer(tensor, absent);
  if (tensor->kind == HVL_ADD_PROCESS_SET) {
    ProcessSet set;
    for (int64_t rank : tensor->arguments) {
      if (options.ranks.contains(static_cast<int>(rank))) set.ranks.add(static_cast<int>(rank));
    }
    process_sets.emplace(next_process_set(process_sets), std::move(set));
  }
  if (tensor->kind == HVL_REMOVE_PROCESS_SET) remove_process_set(static_cast<int32_t>(tensor->arguments[0]));
}

void Aggregator::State::answer(TensorAt tensor, const RankSet& absent) {
  const bool was_join = !tensor->joined.empty();
  tensor->answer(absent);
  if (!was_join) return;
  ProcessSet* set = find_process_set(tensor->process_set);
  set->joined.clear();
  for (const auto& [name, other] : set->names) set->joined.add(other->joined);
}

// If the tensor failed because ranks disagree, the requests of all but the absent ranks have reached the coordinator,
// so none of them is held. If it failed because its process set was removed, this record answers those that are held.
void Aggregator::State::fail(const Record& record) {
  ProcessSet* set = find_process_set(record.signature.process_set);
  if (set == nullptr) return;
  const auto known = set->names.find(record.signature.name);
  if (known == set->names.end()) return;
  const TensorAt tensor = known->second;
  if (record.absent.empty()) tensor->drop();
  settle(tensor);
  answer(tensor, RankSet(record.absent));
  forget_if_unused(tensor);
}

// Announcements by the id do not count any more: the ranks repeat them when they read this record.
void Aggregator::State::evict(TensorId id) {
  const auto known = ids.find(id);
  if (known == ids.end()) return;
  const TensorAt tensor = known->second;
  forget_id(tensor);
  forget_if_unused(tensor);
}

void Aggregator::State::forget_id(TensorAt tensor) {
  ids.erase(tensor->id);
  tensor->forget_id();
  settle(tensor);
}

void Aggregator::State::forget_if_unused(TensorAt tensor) {
  if (!tensor->is_unused()) return;
  find_process_set(tensor->process_set)->names.erase(tensor->name);
  idle.erase(tensor);
}

// Requests with a full signature are passed on, and the coordinator rejects them.
void Aggregator::State::remove_process_set(int32_t process_set) {
  ProcessSet* set = find_process_set(process_set);
  if (set == nullptr) return;
  release_if([&](const PartialTensor& held) { return held.process_set == process_set; });
  for (const auto& [name, tensor] : set->names) {
    ids.erase(tensor->id);
    idle.erase(tensor);
  }
  process_sets.erase(process_set);
}

void Aggregator::State::end() {
  is_over = true;
  outgoing.clear();
  for (PartialTensor& tensor : held) tensor.drop();
  while (!held.empty()) settle(held.begin());
}

// ---- The class ------------------------------------------------------------------------------------------------------

Aggregator::Aggregator(AggregatorOptions options) : state_(std::make_unique<State>(std::move(options))) {}
Aggregator::~Aggregator() = default;

Status Aggregator::accept(const Message& message, uint64_t now) {
  State& state = *state_;
  if (state.is_over) return Status();
  const RankSet& ranks = message.ranks;
  if (ranks.empty() || !ranks.contains(message.latest)) return protocol_error(message.latest, "speaks for no rank");
  if (!state.options.ranks.contains(ranks)) {
    return protocol_error(message.latest, "sent a message for ranks that are not below this host");
  }
  Times times;
  times.latest = message.latest;
  times.last = now - std::min(message.age, now);
  times.since = times.last - std::min(message.spread, times.last);
  switch (message.type) {
    case Message::Type::kReady:
      for (TensorId id : message.ids) state.on_ready(ranks, id, times);
      return Status();
    case Message::Type::kRequest: state.on_request(message, times); return Status();
    case Message::Type::kShutdown:
      state.release_if([](const PartialTensor&) { return true; });
      state.pass_on(message, times);
      state.is_over = true;
      return Status();
  }
  return protocol_error(message.latest, "sent a message of unknown type");
}

void Aggregator::observe(const Record& record) {
  State& state = *state_;
  switch (record.type) {
    case Record::Type::kDefine: return state.define(record);
    case Record::Type::kExecute: {
      const RankSet absent(record.absent);
      for (TensorId id : record.ids) state.execute(id, absent);
      return;
    }
    case Record::Type::kError: return state.fail(record);
    case Record::Type::kEvict:
      for (TensorId id : record.ids) state.evict(id);
      return;
    case Record::Type::kShutdown: return state.end();
  }
}

void Aggregator::take(uint64_t now, std::vector<Message>* messages) {
  State& state = *state_;
  while (!state.held.empty() && state.held.front().deadline <= now) {
    state.release(state.held.begin());
  }
  for (Outgoing& outgoing : state.outgoing) {
    const Times& times = outgoing.times;
    outgoing.message.latest = times.latest;
    outgoing.message.age = now - std::min(times.last, now);
    outgoing.message.spread = times.last - times.since;
    messages->push_back(std::move(outgoing.message));
  }
  state.outgoing.clear();
}

uint64_t Aggregator::next_deadline() const {
  if (!state_->outgoing.empty()) return 0;
  return state_->held.empty() ? UINT64_MAX : state_->held.front().deadline;
}

}  // namespace hvl
