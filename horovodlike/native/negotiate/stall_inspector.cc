#include <algorithm>
#include <set>

#include "base/clock.h"
#include "negotiate/coordinator.h"
#include "negotiate/rank_set.h"

namespace hvl {

namespace {

constexpr size_t kMaxNames = 10;

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

std::string describe(const Pending& tensor, uint64_t now) {
  std::string set;
  if (tensor.process_set != 0) {
    set = " on process set " + std::to_string(tensor.process_set) + " (" + text_of_ranks(tensor.members) + ")";
  }
  return std::string(name_of(tensor.kind)) + " of '" + tensor.name + "'" + set + ": ready on ranks [" +
         list(tensor.ready) + "] for " + std::to_string((now - tensor.since) / kSecond) + " s, missing on ranks [" +
         list(tensor.missing) + "]";
}

}  // namespace

StallInspector::StallInspector(double warning_time, double shutdown_time)
    : warning_time_(to_ns(warning_time)), shutdown_time_(to_ns(shutdown_time)) {}

bool StallInspector::ends_job(const Pending& tensor, uint64_t now) const {
  return shutdown_time_ > 0 && now - tensor.since >= shutdown_time_;
}

uint64_t StallInspector::latest_stall(uint64_t now) const {
  uint64_t least = now;
  for (uint64_t time : {warning_time_, shutdown_time_}) {
    if (time > 0) least = std::min(least, time);
  }
  return now - least;
}

bool StallInspector::is_over(const std::vector<Pending>& pending, uint64_t now) const {
  return std::any_of(pending.begin(), pending.end(), [&](const Pending& tensor) { return ends_job(tensor, now); });
}

StallVerdict StallInspector::inspect(const std::vector<Pending>& pending, uint64_t now) {
  StallVerdict verdict;
  std::string names;
  std::set<int> missing;
  size_t stalled = 0;
  for (const Pending& tensor : pending) {
    const bool ends = ends_job(tensor, now);
    if (!ends && (warning_time_ == 0 || now - tensor.since < warning_time_)) continue;
    verdict.shut_down |= ends;
    missing.insert(tensor.missing.begin(), tensor.missing.end());
    if (++stalled <= kMaxNames) names += "\n  " + describe(tensor, now);
  }
  if (stalled == 0) return verdict;
  if (!verdict.shut_down && last_warning_ != 0 && now - last_warning_ < warning_time_) return verdict;
  last_warning_ = now;
  verdict.missing.assign(missing.begin(), missing.end());
  if (stalled > kMaxNames) names += "\n  and " + std::to_string(stalled - kMaxNames) + " more";
  verdict.warning =
      "stalled: some ranks wait for others that have not asked for the same tensors. Ranks that go "
      "through different code, one that has run out of data without hvd.join(), or one that is stuck, are the usual "
      "causes." +
      names;
  return verdict;
}

}  // namespace hvl
