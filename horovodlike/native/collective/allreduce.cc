#include "collective/allreduce.h"

#include <cstring>
#include <vector>

namespace hvl {

namespace {

// Up to here one synchronisation and more work is quicker than two and less work.
constexpr uint64_t kSmallBatch = 32 << 10;
// A batch is cut into at least this many chunks, if they do not get smaller than kSmallChunk, so that steps overlap.
constexpr uint64_t kMinChunks = 4;
constexpr uint64_t kSmallChunk = 64 << 10;

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

class Allreduce {
 public:
  Allreduce(const Batch& batch, ChunkPipeline* pipeline, const FinalBytes& final_bytes)
      : batch_(batch),
        pipeline_(*pipeline),
        final_bytes_(final_bytes),
        sources_(static_cast<size_t>(pipeline->ranks())) {}

  Status run() {
    if (batch_.num_bytes() <= std::min(kSmallBatch, pipeline_.slot_bytes())) return run_small();
    return run_large();
  }

 private:
  Status run_small() {
    const uint64_t end = batch_.num_bytes();
    auto fill = [&](uint64_t chunk) { copy_in(0, end, pipeline_.slot(pipeline_.local_rank(), chunk)); };
    auto drain = [&](uint64_t chunk) {
      batch_.for_each_piece(0, end, [&](const Segment& segment, uint64_t, uint64_t at, uint64_t num_bytes) {
        reduce_piece(segment, 0, chunk, at, num_bytes, segment.output);
      });
      final_bytes_(end);
    };
    return pipeline_.run(1, fill, drain);
  }

  Status run_large() {
    const uint64_t length = batch_.num_bytes();
    uint64_t wanted = std::max(round_up(length / kMinChunks, kAlignment), kSmallChunk);
    chunk_bytes_ = std::min(wanted, pipeline_.slot_bytes());
    const uint64_t ranks = static_cast<uint64_t>(pipeline_.ranks());
    const uint64_t mine = static_cast<uint64_t>(pipeline_.local_rank());

    auto fill = [&](uint64_t chunk) {
      for (uint64_t part = 0; part < ranks; ++part) {
        if (part != mine) copy_in_part(chunk, part);
      }
    };
    auto reduce_mine = [&](uint64_t chunk) {
      Range range = range_of(chunk, mine);
      char* slot = pipeline_.slot(pipeline_.local_rank(), chunk) + range.in_slot;
      batch_.for_each_piece(range.begin, range.end,
                            [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                              reduce_piece(segment, from, chunk, range.in_slot + at, num_bytes, slot + at);
                              memcpy(segment.output + from, slot + at, num_bytes);
                            });
    };
    auto drain = [&](uint64_t chunk) {
      for (uint64_t part = 0; part < ranks; ++part) {
        if (part != mine) copy_out_part(chunk, part);
      }
      final_bytes_(std::min(length, (chunk + 1) * chunk_bytes_));
    };
    return pipeline_.run((length + chunk_bytes_ - 1) / chunk_bytes_, fill, reduce_mine, drain);
  }

  // A rank's part of a chunk, in the stream and in a slot.
  struct Range {
    uint64_t begin, end, in_slot;
  };

  Range range_of(uint64_t chunk, uint64_t part) const {
    uint64_t begin = chunk * chunk_bytes_;
    uint64_t length = std::min(chunk_bytes_, batch_.num_bytes() - begin);
    uint64_t share = round_up((length + sources_.size() - 1) / sources_.size(), kAlignment);
    uint64_t from = std::min(part * share, length);
    uint64_t to = std::min(from + share, length);
    return Range{begin + from, begin + to, from};
  }

  void copy_in(uint64_t begin, uint64_t end, char* slot) {
    batch_.for_each_piece(begin, end, [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
      memcpy(slot + at, segment.input + from, num_bytes);
    });
  }

  void copy_in_part(uint64_t chunk, uint64_t part) {
    Range range = range_of(chunk, part);
    copy_in(range.begin, range.end, pipeline_.slot(pipeline_.local_rank(), chunk) + range.in_slot);
  }

  void copy_out_part(uint64_t chunk, uint64_t part) {
    Range range = range_of(chunk, part);
    const char* slot = pipeline_.slot(static_cast<int>(part), chunk) + range.in_slot;
    batch_.for_each_piece(range.begin, range.end,
                          [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                            memcpy(segment.output + from, slot + at, num_bytes);
                          });
  }

  // Reduces `num_bytes` that stand at `in_slot` of every other rank's slot and at `from` of this rank's own segment.
  void reduce_piece(const Segment& segment, uint64_t from, uint64_t chunk, uint64_t in_slot, uint64_t num_bytes,
                    char* result) {
    for (int rank = 0; rank < pipeline_.ranks(); ++rank) {
      const char* source =
          rank == pipeline_.local_rank() ? segment.input + from : pipeline_.slot(rank, chunk) + in_slot;
      sources_[static_cast<size_t>(rank)] = source;
    }
    reduce(segment.reduction, sources_.data(), pipeline_.ranks(), result, num_bytes / size_of(segment.reduction.dtype));
  }

  const Batch& batch_;
  ChunkPipeline& pipeline_;
  const FinalBytes& final_bytes_;
  std::vector<const void*> sources_;
  uint64_t chunk_bytes_ = 0;
};

}  // namespace

Status allreduce(const Batch& batch, ChunkPipeline* pipeline, const FinalBytes& final_bytes) {
  return Allreduce(batch, pipeline, final_bytes).run();
}

}  // namespace hvl
