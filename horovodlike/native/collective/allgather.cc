#include "collective/allgather.h"

#include <cstring>

namespace hvl {

Status allgather(const Gather& gather, ChunkPipeline* pipeline) {
  const uint64_t chunk_bytes = pipeline->slot_bytes();
  const int ranks = pipeline->ranks();
  const int mine = pipeline->local_rank();

  uint64_t longest = 0;
  std::vector<char*> blocks;  // where each rank's block begins in the output
  char* next = gather.output;
  for (uint64_t block_bytes : gather.block_bytes) {
    blocks.push_back(next);
    next += block_bytes;
    longest = std::max(longest, block_bytes);
  }
  auto piece_bytes = [&](int rank, uint64_t chunk) {
    uint64_t block_bytes = gather.block_bytes[static_cast<size_t>(rank)];
    uint64_t begin = std::min(chunk * chunk_bytes, block_bytes);
    return std::min(chunk_bytes, block_bytes - begin);
  };

  auto fill = [&](uint64_t chunk) {
    uint64_t num_bytes = piece_bytes(mine, chunk);
    if (num_bytes == 0) return;
    const char* piece = gather.input + chunk * chunk_bytes;
    memcpy(pipeline->slot(mine, chunk), piece, num_bytes);
    memcpy(blocks[static_cast<size_t>(mine)] + chunk * chunk_bytes, piece, num_bytes);
  };
  auto drain = [&](uint64_t chunk) {
    for (int rank = 0; rank < ranks; ++rank) {
      uint64_t num_bytes = piece_bytes(rank, chunk);
      if (rank == mine || num_bytes == 0) continue;
      memcpy(blocks[static_cast<size_t>(rank)] + chunk * chunk_bytes, pipeline->slot(rank, chunk), num_bytes);
    }
  };
  return pipeline->run((longest + chunk_bytes - 1) / chunk_bytes, fill, drain);
}

}  // namespace hvl
