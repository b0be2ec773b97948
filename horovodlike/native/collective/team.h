// The ranks that take part in a collective.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace hvl {

struct Team {
  std::vector<int> ranks;  // ascending
  size_t mine = 0;         // this rank's place among them; the number of ranks if it is no member
  bool is_whole = true;    // all of a process set take part

  Team() = default;
  Team(std::vector<int> members, int rank) : ranks(std::move(members)) {
    mine = static_cast<size_t>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }
  size_t size() const { return ranks.size(); }
  bool is_member() const { return mine < ranks.size(); }
  bool contains(int rank) const { return std::binary_search(ranks.begin(), ranks.end(), rank); }
  // The place of a member.
  int place_of(int rank) const {
    return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }
};

using TeamPtr = std::shared_ptr<const Team>;

}  // namespace hvl
