#include "watch/stall_inspector.h"

#include "base/clock.h"

namespace hvl {

namespace {

constexpr size_t kMaxNames = 10;

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

std::string describe(const Pending& tensor, uint64_t now) {
  return std::string(name_of(tensor.kind)) + " of '" + tensor.name + "': ready on ranks [" + list(tensor.ready) +
         "] for " + std::to_string((now - tensor.since) / kSecond) + " s, missing on ranks [" + list(tensor.missing) +
         "]";
}

}  // namespace

StallInspector::StallInspector(double warning_time, double shutdown_time)
    : warning_time_(to_ns(warning_time)), shutdown_time_(to_ns(shutdown_time)) {}

StallVerdict StallInspector::inspect(const std::vector<Pending>& pending, uint64_t now) {
  StallVerdict verdict;
  std::string names;
  size_t stalled = 0;
  for (const Pending& tensor : pending) {
    uint64_t waited = now - tensor.since;
    bool is_over = shutdown_time_ > 0 && waited >= shutdown_time_;
    bool is_late = warning_time_ > 0 && waited >= warning_time_;
    if (!is_over && !is_late) continue;
    verdict.shut_down |= is_over;
    if (++stalled <= kMaxNames) names += "\n  " + describe(tensor, now);
  }
  if (stalled == 0) return verdict;
  if (!verdict.shut_down && last_warning_ != 0 && now - last_warning_ < warning_time_) return verdict;
  last_warning_ = now;
  if (stalled > kMaxNames) names += "\n  and " + std::to_string(stalled - kMaxNames) + " more";
  verdict.warning =
      "stalled: some ranks wait for others that have not asked for the same tensors. Ranks that go "
      "through different code, or one that is stuck, are the usual causes." +
      names;
  return verdict;
}

}  // namespace hvl
