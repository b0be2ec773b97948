#include <cstring>

#include "collective/shm/shm_data_plane.h"

namespace hvl {

Status broadcast(const Batch& batch, int root, ChunkPipeline* pipeline, const FinalBytes& final_bytes) {
  const uint64_t length = batch.num_bytes();
  const uint64_t chunk_bytes = pipeline->slot_bytes();
  const bool is_root = pipeline->mine() == root;

  auto fill = [&](uint64_t chunk) {
    if (!is_root) return;
    char* slot = pipeline->slot(root, chunk);
    batch.for_each_piece(chunk * chunk_bytes, (chunk + 1) * chunk_bytes,
                         [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                           memcpy(slot + at, segment.input + from, num_bytes);
                           if (segment.output != segment.input) memcpy(segment.output + from, slot + at, num_bytes);
                         });
  };
  auto drain = [&](uint64_t chunk) {
    const char* slot = pipeline->slot(root, chunk);
    if (!is_root) {
      batch.for_each_piece(chunk * chunk_bytes, (chunk + 1) * chunk_bytes,
                           [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                             memcpy(segment.output + from, slot + at, num_bytes);
                           });
    }
    final_bytes(std::min(length, (chunk + 1) * chunk_bytes));
  };
  return pipeline->run((length + chunk_bytes - 1) / chunk_bytes, fill, drain);
}

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

Status alltoall(const Exchange& exchange, ChunkPipeline* pipeline) {
  const size_t ranks = static_cast<size_t>(pipeline->ranks());
  const size_t mine = static_cast<size_t>(pipeline->mine());
  const uint64_t piece = pipeline->slot_bytes() / ranks / kAlignment * kAlignment;
  auto piece_bytes = [&](uint64_t num_bytes, uint64_t chunk) {
    return std::min(piece, num_bytes - std::min(chunk * piece, num_bytes));
  };
  auto fill = [&](uint64_t chunk) {
    char* slot = pipeline->slot(pipeline->mine(), chunk);
    for (size_t member = 0; member < ranks; ++member) {
      const Block<const char>& block = exchange.sent[member];
      const uint64_t num_bytes = piece_bytes(block.num_bytes, chunk);
      if (num_bytes == 0) continue;
      char* to = member == mine ? exchange.received[mine].data + chunk * piece : slot + member * piece;
      memcpy(to, block.data + chunk * piece, num_bytes);
    }
  };
  auto drain = [&](uint64_t chunk) {
    for (size_t member = 0; member < ranks; ++member) {
      const Block<char>& block = exchange.received[member];
      const uint64_t num_bytes = piece_bytes(block.num_bytes, chunk);
      if (member == mine || num_bytes == 0) continue;
      memcpy(block.data + chunk * piece, pipeline->slot(static_cast<int>(member), chunk) + mine * piece, num_bytes);
    }
  };
  return pipeline->run((exchange.longest + piece - 1) / piece, fill, drain);
}

}  // namespace hvl
