// Ranks in words, for messages that name them.
#pragma once

#include <string>
#include <vector>

namespace hvl {

// "rank 3", "ranks 0, 1, 5"; more than eight are shortened: "ranks 0-6, 9 and 3 more". `ranks` must be ascending.
std::string text_of_ranks(const std::vector<int>& ranks);

}  // namespace hvl
