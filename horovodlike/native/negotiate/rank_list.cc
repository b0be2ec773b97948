#include "negotiate/rank_list.h"

namespace hvl {
namespace {

constexpr size_t kMostRanks = 8;   // written out one by one
constexpr size_t kMostPieces = 4;  // of a shortened list: single ranks and runs

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

std::string text_of_ranks(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return "rank " + std::to_string(ranks[0]);
  return "ranks " + (ranks.size() <= kMostRanks ? one_by_one(ranks) : in_runs(ranks));
}

}  // namespace hvl
