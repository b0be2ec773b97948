#include "collective/allreduce.h"

#include <cstring>
#include <vector>

namespace hvl {

namespace {

// Up to here one synchronisation and more arithmetic is quicker than two and less arithmetic.
constexpr uint64_t kSmallBatch = 32 << 10;
// A batch is cut into at least this many chunks, if they do not get smaller than kSmallChunk, so that steps overlap.
constexpr uint64_t kMinChunks = 4;
constexpr uint64_t kSmallChunk = 64 << 10;
// What is reduced into a slot is copied on to the tensor in blocks that are still in the level 1 cache.
constexpr uint64_t kBlock = 8 << 10;

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

class Allreduce {
 public:
  Allreduce(const Batch& batch, ChunkPipeline* pipeline, const FinalBytes& final_bytes)
      : batch_(batch),
        pipeline_(*pipeline),
        final_bytes_(final_bytes),
        sources_(static_cast<size_t>(pipeline->ranks())) {}

  Status run() {
    const uint64_t length = batch_.num_bytes();
    if (length <= std::min(kSmallBatch, pipeline_.slot_bytes())) {
      chunk_bytes_ = std::max(length, kAlignment);
      return run_whole();
    }
    uint64_t wanted = std::max(round_up(length / kMinChunks, kAlignment), kSmallChunk);
    chunk_bytes_ = std::min(wanted, pipeline_.slot_bytes());
    // Of two ranks each moves as many bytes between the processors either way.
    return pipeline_.ranks() == 2 ? run_whole() : run_in_parts();
  }

 private:
  // Every rank copies all its bytes in, and reduces everything into its own tensors.
  Status run_whole() {
    auto fill = [&](uint64_t chunk) {
      Range range = range_of(chunk, 0, 1);
      copy_in(range, pipeline_.slot(pipeline_.local_rank(), chunk));
    };
    auto drain = [&](uint64_t chunk) {
      Range range = range_of(chunk, 0, 1);
      batch_.for_each_piece(range.begin, range.end,
                            [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                              reduce_piece(segment, from, chunk, at, num_bytes, segment.output + from);
                            });
      final_bytes_(range.end);
    };
    return pipeline_.run(num_chunks(), fill, drain);
  }

  // Every rank reduces its part of each chunk into its slot, and takes the other parts from the others' slots.
  Status run_in_parts() {
    const uint64_t ranks = static_cast<uint64_t>(pipeline_.ranks());
    const uint64_t mine = static_cast<uint64_t>(pipeline_.local_rank());
    auto fill = [&](uint64_t chunk) {
      for (uint64_t part = 0; part < ranks; ++part) {
        if (part != mine) copy_in(range_of(chunk, part, ranks), pipeline_.slot(pipeline_.local_rank(), chunk));
      }
    };
    auto reduce_mine = [&](uint64_t chunk) { reduce_part(chunk, range_of(chunk, mine, ranks)); };
    auto drain = [&](uint64_t chunk) {
      for (uint64_t part = 0; part < ranks; ++part) {
        if (part != mine) copy_out(range_of(chunk, part, ranks), pipeline_.slot(static_cast<int>(part), chunk));
      }
      final_bytes_(range_of(chunk, 0, 1).end);
    };
    return pipeline_.run(num_chunks(), fill, reduce_mine, drain);
  }

  // A part of a chunk, in the stream and in a slot.
  struct Range {
    uint64_t begin, end, in_slot;
  };

  uint64_t num_chunks() const { return (batch_.num_bytes() + chunk_bytes_ - 1) / chunk_bytes_; }

  Range range_of(uint64_t chunk, uint64_t part, uint64_t parts) const {
    uint64_t begin = chunk * chunk_bytes_;
    uint64_t length = std::min(chunk_bytes_, batch_.num_bytes() - begin);
    uint64_t share = round_up((length + parts - 1) / parts, kAlignment);
    uint64_t from = std::min(part * share, length);
    uint64_t to = std::min(from + share, length);
    return Range{begin + from, begin + to, from};
  }

  void copy_in(const Range& range, char* slot) {
    batch_.for_each_piece(range.begin, range.end,
                          [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                            memcpy(slot + range.in_slot + at, segment.input + from, num_bytes);
                          });
  }

  void copy_out(const Range& range, const char* slot) {
    batch_.for_each_piece(range.begin, range.end,
                          [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                            memcpy(segment.output + from, slot + range.in_slot + at, num_bytes);
                          });
  }

  void reduce_part(uint64_t chunk, const Range& range) {
    char* slot = pipeline_.slot(pipeline_.local_rank(), chunk) + range.in_slot;
    batch_.for_each_piece(range.begin, range.end,
                          [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                            for (uint64_t done = 0; done < num_bytes; done += kBlock) {
                              uint64_t block = std::min(kBlock, num_bytes - done);
                              char* result = slot + at + done;
                              reduce_piece(segment, from + done, chunk, range.in_slot + at + done, block, result);
                              memcpy(segment.output + from + done, result, block);
                            }
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
