#include <cstring>
#include <vector>

#include "collective/shm/shm_data_plane.h"

namespace hvl {

namespace {

// As in allreduce.cc: so few bytes that the slots in use stay in the level 2 cache.
constexpr uint64_t kMaxPiece = 32 << 10;

}  // namespace

Status reducescatter(const Scatter& scatter, ChunkPipeline* pipeline) {
  const size_t ranks = static_cast<size_t>(pipeline->ranks());
  const size_t mine = static_cast<size_t>(pipeline->mine());
  const std::vector<Block<const char>>& blocks = scatter.blocks;
  const uint64_t piece = std::min(kMaxPiece, pipeline->slot_bytes() / ranks / kAlignment * kAlignment);
  uint64_t longest = 0;
  for (const Block<const char>& block : blocks) longest = std::max(longest, block.num_bytes);
  auto piece_bytes = [&](size_t member, uint64_t chunk) {
    const uint64_t num_bytes = blocks[member].num_bytes;
    return std::min(piece, num_bytes - std::min(chunk * piece, num_bytes));
  };
  auto fill = [&](uint64_t chunk) {
    char* slot = pipeline->slot(pipeline->mine(), chunk);
    for (size_t member = 0; member < ranks; ++member) {
      uint64_t num_bytes = piece_bytes(member, chunk);
      if (member == mine || num_bytes == 0) continue;
      memcpy(slot + member * piece, blocks[member].data + chunk * piece, num_bytes);
    }
  };
  std::vector<const void*> sources(ranks);
  auto drain = [&](uint64_t chunk) {
    uint64_t num_bytes = piece_bytes(mine, chunk);
    if (num_bytes == 0) return;
    for (size_t member = 0; member < ranks; ++member) {
      sources[member] = member == mine ? blocks[mine].data + chunk * piece
                                       : pipeline->slot(static_cast<int>(member), chunk) + mine * piece;
    }
    void* dst = scatter.output + chunk * piece;
    size_t count = num_bytes / size_of(scatter.reduction.dtype);
    reduce(scatter.reduction, Arrays{sources.data(), pipeline->ranks(), &dst, 1, count});
  };
  return pipeline->run((longest + piece - 1) / piece, fill, drain);
}

}  // namespace hvl
