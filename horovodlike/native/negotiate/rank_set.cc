#include "negotiate/rank_set.h"

#include <algorithm>

namespace hvl {
namespace {

int32_t length_of(const RankRange& range) { return range.last - range.first + 1; }

// The first range that ends at `rank` or later.
std::vector<RankRange>::const_iterator at_or_after(const std::vector<RankRange>& ranges, int64_t rank) {
  return std::lower_bound(ranges.begin(), ranges.end(), rank,
                          [](const RankRange& range, int64_t value) { return range.last < value; });
}

constexpr size_t kMostRanks = 8;   // a longer list is shortened
constexpr size_t kMostPieces = 4;  // the single ranks and runs that a shortened list shows

std::string one_by_one(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

std::string in_runs(const std::vector<int>& ranks) {
  std::string text;
  size_t next = 0;
  for (size_t piece = 0; piece < kMostPieces && next < ranks.size(); ++piece) {
    const size_t first = next++;
    while (next < ranks.size() && ranks[next] == ranks[next - 1] + 1) ++next;
    text += (text.empty() ? "" : ", ") + std::to_string(ranks[first]);
    if (next - first > 1) text += "-" + std::to_string(ranks[next - 1]);
  }
  if (next < ranks.size()) text += " and " + std::to_string(ranks.size() - next) + " more";
  return text;
}

}  // namespace

RankSet::RankSet(const std::vector<int>& ranks) {
  for (int rank : ranks) add(rank);
}

bool RankSet::contains(int rank) const {
  const auto range = at_or_after(ranges_, rank);
  return range != ranges_.end() && range->first <= rank;
}

bool RankSet::contains(const RankSet& other) const {
  return std::all_of(other.ranges_.begin(), other.ranges_.end(), [this](const RankRange& part) {
    const auto range = at_or_after(ranges_, part.first);
    return range != ranges_.end() && range->first <= part.first && part.last <= range->last;
  });
}

int32_t RankSet::first_common(const RankSet& other) const {
  for (const RankRange& part : other.ranges_) {
    const auto range = at_or_after(ranges_, part.first);
    if (range != ranges_.end() && range->first <= part.last) return std::max(range->first, part.first);
  }
  return -1;
}

void RankSet::clear() {
  ranges_.clear();
  size_ = 0;
}

void RankSet::add(const RankRange& range) {
  // The common case: ranks come in ascending order.
  if (ranges_.empty() || int64_t{ranges_.back().last} + 1 < range.first) {
    ranges_.push_back(range);
    size_ += length_of(range);
    return;
  }
  // Merges all ranges that touch the new one.
  auto begin = ranges_.begin() + (at_or_after(ranges_, int64_t{range.first} - 1) - ranges_.cbegin());
  auto end = begin;
  RankRange joined = range;
  for (; end != ranges_.end() && end->first <= int64_t{range.last} + 1; ++end) {
    joined.first = std::min(joined.first, end->first);
    joined.last = std::max(joined.last, end->last);
    size_ -= length_of(*end);
  }
  size_ += length_of(joined);
  if (begin == end) {
    ranges_.insert(begin, joined);
  } else {
    *begin = joined;
    ranges_.erase(begin + 1, end);
  }
}

void RankSet::add(const RankSet& other) {
  if (empty()) {
    *this = other;
    return;
  }
  for (const RankRange& range : other.ranges_) add(range);
}

void RankSet::remove(const RankSet& other) {
  if (first_common(other) < 0) return;
  std::vector<RankRange> before;
  before.swap(ranges_);
  size_ = 0;
  for (RankRange rest : before) {
    for (auto cut = at_or_after(other.ranges_, rest.first); cut != other.ranges_.end() && cut->first <= rest.last;
         ++cut) {
      if (rest.first < cut->first) add(RankRange{rest.first, cut->first - 1});
      rest.first = cut->last + 1;
      if (rest.first > rest.last) break;
    }
    if (rest.first <= rest.last) add(rest);
  }
}

void RankSet::keep(const RankSet& other) {
  if (empty() || other.empty()) return clear();
  RankSet others = *this;
  others.remove(other);
  remove(others);
}

std::vector<int> RankSet::list() const {
  std::vector<int> ranks;
  ranks.reserve(static_cast<size_t>(size_));
  for_each([&](int rank) { ranks.push_back(rank); });
  return ranks;
}

std::string text_of_ranks(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return "rank " + std::to_string(ranks[0]);
  return "ranks " + (ranks.size() <= kMostRanks ? one_by_one(ranks) : in_runs(ranks));
}

}  // namespace hvl
