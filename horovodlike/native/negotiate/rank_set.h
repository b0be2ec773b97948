// A set of ranks, kept as ranges: the ranks of a host, or of a tree of hosts, are few ranges for any number of ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hvl {

struct RankRange {
  int32_t first = 0;
  int32_t last = 0;  // included
};

inline bool operator==(const RankRange& a, const RankRange& b) { return a.first == b.first && a.last == b.last; }

class RankSet {
 public:
  RankSet() = default;
  explicit RankSet(int rank) : ranges_{{rank, rank}}, size_(1) {}
  // `ranks`: ascending.
  explicit RankSet(const std::vector<int>& ranks);

  bool empty() const { return size_ == 0; }
  int32_t size() const { return size_; }  // how many ranks
  // Ascending, with at least one rank missing between two ranges, so that equal sets have equal lists.
  const std::vector<RankRange>& ranges() const { return ranges_; }
  // The set must not be empty.
  int32_t lowest() const { return ranges_.front().first; }
  int32_t highest() const { return ranges_.back().last; }

  bool contains(int rank) const;
  bool contains(const RankSet& other) const;  // all ranks of `other`
  // The lowest rank in both sets; -1: none.
  int32_t first_common(const RankSet& other) const;

  void clear();
  void add(int rank) { add(RankRange{rank, rank}); }
  void add(const RankRange& range);
  void add(const RankSet& other);
  void remove(const RankSet& other);
  void keep(const RankSet& other);  // removes all ranks that are not in `other`

  template <typename F>
  void for_each(F visit) const {
    for (const RankRange& range : ranges_) {
      for (int32_t rank = range.first; rank <= range.last; ++rank) visit(rank);
    }
  }
  std::vector<int> list() const;  // ascending

  bool operator==(const RankSet& other) const { return ranges_ == other.ranges_; }
  bool operator!=(const RankSet& other) const { return !(*this == other); }

 private:
  std::vector<RankRange> ranges_;
  int32_t size_ = 0;
};

// The ranks as text: "rank 3" or "ranks 0, 1, 5". More than eight become at most four ranks or ranges, and a count of
// the others: "ranks 0-6, 9, 12, 14 and 3 more". `ranks` must be ascending.
std::string text_of_ranks(const std::vector<int>& ranks);

}  // namespace hvl
