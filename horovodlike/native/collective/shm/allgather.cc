#include "collective/shm/allgather.h"

#include <cstring>

namespace hvl {

Status allgather(const Gather& gather, ChunkPipeline* pipeline) {
  const uint64_t chunk_bytes = pipeline->slot_bytes();
  const int mine = pipeline->mine();
  const std::vector<Block<char>>& blocks = gather.blocks;

  uint64_t longest = 0;
  for (const Block<char>& block : blocks) longest = std::max(longest, block.num_bytes);
  auto piece_of = [&](size_t member, uint64_t chunk) {
    const uint64_t begin = std::min(chunk * chunk_bytes, blocks[member].num_bytes);
    return Block<char>{blocks[member].data + begin, std::min(chunk_bytes, blocks[member].num_bytes - begin)};
  };

  auto fill = [&](uint64_t chunk) {
    const Block<char> piece = piece_of(static_cast<size_t>(mine), chunk);
    if (piece.num_bytes == 0) return;
    const char* input = gather.input + chunk * chunk_bytes;
    memcpy(pipeline->slot(mine, chunk), input, piece.num_bytes);
    memcpy(piece.data, input, piece.num_bytes);
  };
  auto drain = [&](uint64_t chunk) {
    for (int member = 0; member < pipeline->ranks(); ++member) {
      const Block<char> piece = piece_of(static_cast<size_t>(member), chunk);
      if (member == mine || piece.num_bytes == 0) continue;
      memcpy(piece.data, pipeline->slot(member, chunk), piece.num_bytes);
    }
  };
  return pipeline->run((longest + chunk_bytes - 1) / chunk_bytes, fill, drain);
}

}  // namespace hvl
