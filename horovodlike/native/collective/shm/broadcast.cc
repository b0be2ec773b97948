#include "collective/shm/broadcast.h"

#include <cstring>

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

}  // namespace hvl
