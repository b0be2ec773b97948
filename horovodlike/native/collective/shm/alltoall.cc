#include "collective/shm/alltoall.h"

#include <cstring>

namespace hvl {

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
      char* to = member == mine ? exchange.received[mine].data + chunk * piece : slot + member * piece;
      if (num_bytes > 0) memcpy(to, block.data + chunk * piece, num_bytes);
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
