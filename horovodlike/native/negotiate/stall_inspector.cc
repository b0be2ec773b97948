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

std::string usual_cause(const std::vector<Pending>& pending) {
  const auto is_missing = [](const Pending& a, const Pending& on_a_rank_of) {
    return std::count(a.missing.begin(), a.missing.end(), on_a_rank_of.ready.front()) > 0;
  };
  const auto is_unnamed = [](const Pending& each) { return each.name.find("noname.") != std::string::npos; };
  for (const Pending& a : pending) {
    for (const Pending& b : pending) {
      if (is_unnamed(a) && is_unnamed(b) && is_missing(a, b) && is_missing(b, a))
        return "Calls without names came in another order on some ranks, as from several threads: give them names.";
    }
    if (a.kind == HVL_BARRIER)
      return "A rank that has called fewer barriers (is one inside `if rank() == 0`?), or one that is stuck, is the "
             "usual cause.";
  }
  return "Ranks that go through different code, one that has run out of data without hvd.join(), or one that is stuck, "
         "are the usual causes.";
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
  const Pending* oldest = nullptr;
  std::string names;
  std::set<int> missing;
  size_t stalled = 0;
  for (const Pending& tensor : pending) {
    const bool ends = ends_job(tensor, now);
    if (!ends && (warning_time_ == 0 || now - tensor.since < warning_time_)) continue;
    verdict.shut_down |= ends;
    missing.insert(tensor.missing.begin(), tensor.missing.end());
    if (++stalled <= kMaxNames) names += "\n  " + describe(tensor, now);
    if (oldest == nullptr || tensor.since < oldest->since) oldest = &tensor;
  }
  if (oldest == nullptr) {
    if (now > last_warning_ + 2 * interval_) reported_.clear();  // else it may come again in each step
    return verdict;
  }
  verdict.missing.assign(missing.begin(), missing.end());
  std::string report = describe(*oldest, oldest->since) + list(verdict.missing);
  const bool is_known = report == reported_ && !verdict.shut_down;
  const uint64_t interval = is_known ? interval_ : warning_time_;
  if (!verdict.shut_down && last_warning_ != 0 && now - last_warning_ < interval) return StallVerdict();
  last_warning_ = now;
  reported_ = std::move(report);
  interval_ = is_known ? 2 * interval_ : warning_time_;
  if (is_known) return StallVerdict{"still stalled, as reported: " + describe(*oldest, now), false, {}};
  if (stalled > kMaxNames) names += "\n  and " + std::to_string(stalled - kMaxNames) + " more";
  verdict.warning =
      "stalled: some ranks wait for others that have not asked for the same tensors. " + usual_cause(pending) + names;
  return verdict;
}

}  // namespace hvl
