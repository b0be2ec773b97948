#include "negotiate/rank_set.h"

#include <random>
#include <set>

#include "check.h"

using namespace hvl;

namespace {

// "0-3 7 9-10"
std::string text_of(const RankSet& set) {
  std::string text;
  for (const RankRange& range : set.ranges()) {
    text += (text.empty() ? "" : " ") + std::to_string(range.first);
    if (range.last > range.first) text += "-" + std::to_string(range.last);
  }
  return text;
}

RankSet set_of(const std::set<int>& ranks) { return RankSet(std::vector<int>(ranks.begin(), ranks.end())); }

}  // namespace

TEST(ranks_that_touch_are_one_range) {
  RankSet set;
  CHECK(set.empty());
  for (int rank : {3, 5, 9, 4, 0}) set.add(rank);
  CHECK_EQ(text_of(set), "0 3-5 9");
  CHECK_EQ(set.size(), 5);
  CHECK_EQ(set.lowest(), 0);
  CHECK_EQ(set.highest(), 9);
  set.add(RankRange{1, 8});
  CHECK_EQ(text_of(set), "0-9");
  CHECK_EQ(set.size(), 10);
  set.remove(RankSet({0, 4, 5, 9}));
  CHECK_EQ(text_of(set), "1-3 6-8");
  set.clear();
  CHECK(set.empty());
  CHECK_EQ(text_of(set), "");
}

// Against sets of single ranks.
TEST(any_sets) {
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    const unsigned limit = 1 + random() % 40;
    std::set<int> a, b;
    RankSet x;
    for (unsigned n = random() % 20; n > 0; --n) {
      const int first = static_cast<int>(random() % limit);
      const int last = first + static_cast<int>(random() % 4);
      for (int rank = first; rank <= last; ++rank) a.insert(rank);
      x.add(RankRange{first, last});
    }
    for (unsigned n = random() % 20; n > 0; --n) b.insert(static_cast<int>(random() % limit));
    const RankSet y = set_of(b);
    CHECK_EQ(text_of(x), text_of(set_of(a)));
    CHECK_EQ(x.size(), a.size());
    CHECK(set_of(std::set<int>(a)).list() == std::vector<int>(a.begin(), a.end()));

    std::set<int> both, common, rest;
    for (int rank = 0; rank < 50; ++rank) {
      const bool in_a = a.count(rank) > 0, in_b = b.count(rank) > 0;
      CHECK_EQ(x.contains(rank), in_a);
      if (in_a || in_b) both.insert(rank);
      if (in_a && in_b) common.insert(rank);
      if (in_a && !in_b) rest.insert(rank);
    }
    CHECK_EQ(x.contains(y), common.size() == b.size());
    CHECK_EQ(x.first_common(y), common.empty() ? -1 : *common.begin());
    CHECK((x == y) == (a == b));
    RankSet added = x, removed = x, kept = x;
    added.add(y);
    removed.remove(y);
    CHECK_EQ(text_of(added), text_of(set_of(both)));
    CHECK_EQ(added.size(), both.size());
    kept.keep(y);
    CHECK_EQ(text_of(kept), text_of(set_of(common)));
    CHECK_EQ(kept.size(), common.size());
    CHECK_EQ(text_of(removed), text_of(set_of(rest)));
    CHECK_EQ(removed.size(), rest.size());
  }
}
