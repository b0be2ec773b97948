#include "collective/reducescatter.h"

#include <cstring>
#include <vector>

namespace hvl {

namespace {

// As for an allreduce: so small that the slots in use stay in the level 2 cache.
constexpr uint64_t kMaxPiece = 32 << 10;

}  // namespace

Status reducescatter(const Scatter& scatter, ChunkPipeline* pipeline) {
  const size_t ranks = static_cast<size_t>(pipeline->ranks());
  const size_t mine = static_cast<size_t>(pipeline->local_rank());
  const uint64_t piece = std::min(kMaxPiece, pipeline->slot_bytes() / ranks / kAlignment * kAlignment);
  uint64_t longest = 0;
  std::vector<const char*> blocks;  // where each rank's block begins in the input
  const char* next = scatter.input;
  for (uint64_t block_bytes : scatter.block_bytes) {
    blocks.push_back(next);
    next += block_bytes;
    longest = std::max(longest, block_bytes);
  }
  auto piece_bytes = [&](size_t rank, uint64_t chunk) {
    uint64_t block_bytes = scatter.block_bytes[rank];
    return std::min(piece, block_bytes - std::min(chunk * piece, block_bytes));
  };
  auto fill = [&](uint64_t chunk) {
    char* slot = pipeline->slot(pipeline->local_rank(), chunk);
    for (size_t rank = 0; rank < ranks; ++rank) {
      uint64_t num_bytes = piece_bytes(rank, chunk);
      if (rank != mine && num_bytes > 0) memcpy(slot + rank * piece, blocks[rank] + chunk * piece, num_bytes);
    }
  };
  std::vector<const void*> sources(ranks);
  auto drain = [&](uint64_t chunk) {
    uint64_t num_bytes = piece_bytes(mine, chunk);
    if (num_bytes == 0) return;
    for (size_t rank = 0; rank < ranks; ++rank) {
      sources[rank] =
          rank == mine ? blocks[mine] + chunk * piece : pipeline->slot(static_cast<int>(rank), chunk) + mine * piece;
    }
    void* dst = scatter.output + chunk * piece;
    size_t count = num_bytes / size_of(scatter.reduction.dtype);
    reduce(scatter.reduction, Arrays{sources.data(), pipeline->ranks(), &dst, 1, count});
  };
  return pipeline->run((longest + piece - 1) / piece, fill, drain);
}

}  // namespace hvl
