// Collectives that are carried out as others: a gather as an alltoall, and a reduction to a root as a reducescatter and
// a gather.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "collective/data_plane.h"

namespace hvl {

// Returns a gather as an exchange in which only the root receives. `input`: this member's block. `output`: the root's
// memory for all blocks, one after the other. `blocks`: gives the lengths of all members' blocks.
template <typename Blocks>
Exchange gather_to(size_t root, size_t mine, const char* input, char* output, const Blocks& blocks) {
  Exchange exchange{{}, {}, 0};
  for (size_t place = 0; place < blocks.size(); ++place) {
    exchange.longest = std::max(exchange.longest, blocks[place].num_bytes);
    exchange.sent.push_back({input, place == root ? blocks[mine].num_bytes : 0});
    exchange.received.push_back({output, mine == root ? blocks[place].num_bytes : 0});
    output += exchange.received.back().num_bytes;
  }
  // The root's own block may be in place already.
  if (mine == root && input == exchange.received[root].data) {
    exchange.sent[root].num_bytes = exchange.received[root].num_bytes = 0;
  }
  return exchange;
}

// Cuts a segment into a block for each of `num_members` members. The caller must set the output.
inline Scatter in_blocks(const Segment& segment, uint64_t num_members) {
  const uint64_t each = align((segment.num_bytes + num_members - 1) / num_members);
  Scatter scatter{{}, nullptr, segment.reduction};
  for (uint64_t begin = 0; scatter.blocks.size() < num_members; begin = std::min(begin + each, segment.num_bytes)) {
    scatter.blocks.push_back({segment.input + begin, std::min(each, segment.num_bytes - begin)});
  }
  return scatter;
}

}  // namespace hvl
