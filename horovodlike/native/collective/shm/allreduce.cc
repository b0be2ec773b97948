#include <cstring>
#include <vector>

#include "base/target.h"
#include "collective/shm/shm_data_plane.h"

namespace hvl {

namespace {

// Up to this size, one synchronisation with more arithmetic takes less time than two synchronisations with less.
constexpr uint64_t kSmallBatch = 32 << 10;
// Up to this many ranks, a root that reduces all of a large batch moves no more bytes between processors than if each
// rank reduced a part. Its chunks can be larger: only the root reads slots, and each of their bytes once.
constexpr int kFewRanks = 2;
constexpr uint64_t kRootChunk = 128 << 10;
// The bytes of a chunk's part for each rank: so few that the slots in use stay in the level 2 cache.
constexpr uint64_t kPart = 32 << 10;

// Copies data that is in memory and in no cache into a slot. A processor's own prefetching stops at each page boundary
// and starts again in the next page; this prefetching continues across it.
void put_in(char* slot, const char* from, uint64_t num_bytes) {
  constexpr uint64_t kBlock = 256;
  constexpr uint64_t kAhead = 8 << 10;
  prefetch_to_read(from, std::min(num_bytes, kAhead));
  for (uint64_t done = 0; done < num_bytes; done += kBlock) {
    const uint64_t ahead = done + kAhead;
    if (ahead < num_bytes) prefetch_to_read(from + ahead, std::min(kBlock, num_bytes - ahead));
    // Not memcpy, which the compiler would emit as `rep movs`, whose start-up takes longer than copying a block.
    memmove(slot + done, from + done, std::min(kBlock, num_bytes - done));
  }
}

// Copies out of a slot that this rank will write again next. The copy waits for another processor, so the data to read
// from memory next (`next`, of the same length, unless null) is prefetched meanwhile.
void take_out(char* to, const char* slot, uint64_t num_bytes, const char* next) {
  constexpr uint64_t kBlock = 512;
  prefetch_to_write(slot, std::min<uint64_t>(num_bytes, kPrefetchAhead));
  for (uint64_t done = 0; done < num_bytes; done += kBlock) {
    uint64_t ahead = done + kPrefetchAhead;
    if (ahead < num_bytes) prefetch_to_write(slot + ahead, std::min(kBlock, num_bytes - ahead));
    if (next != nullptr) prefetch_to_read(next + done, std::min(kBlock, num_bytes - done));
    memmove(to + done, slot + done, std::min(kBlock, num_bytes - done));
  }
}

constexpr int kEveryRank = -1;

// An allreduce, or a reduction to one root.
class Allreduce {
 public:
  // `root`: the place of the only member that receives the result; or kEveryRank.
  Allreduce(const Batch& batch, int root, ChunkPipeline* pipeline, const FinalBytes& final_bytes)
      : batch_(batch),
        root_(root),
        pipeline_(*pipeline),
        final_bytes_(final_bytes),
        sources_(static_cast<size_t>(pipeline->ranks())),
        dsts_(sources_.size()) {}

  Status run() {
    const uint64_t length = batch_.num_bytes();
    if (length <= std::min(kSmallBatch, pipeline_.slot_bytes())) {
      chunk_bytes_ = std::max(length, kAlignment);
      return run_whole();
    }
    if (root_ != kEveryRank && pipeline_.ranks() <= kFewRanks) {
      chunk_bytes_ = std::min(kRootChunk, pipeline_.slot_bytes());
      return run_whole();
    }
    chunk_bytes_ = std::min(kPart * static_cast<uint64_t>(pipeline_.ranks()), pipeline_.slot_bytes());
    return run_in_parts();
  }

 private:
  // Every rank copies all its bytes into its slot, and reduces the data of all ranks into its own tensors. If only a
  // root needs the result, only the root reduces, and it reads its own bytes in place.
  Status run_whole() {
    auto fill = [&](uint64_t chunk) {
      if (root_ != pipeline_.mine()) copy_in(range_of(chunk, 0, 1), pipeline_.slot(pipeline_.mine(), chunk));
    };
    auto drain = [&](uint64_t chunk) {
      const Range range = range_of(chunk, 0, 1);
      if (gets_result()) reduce_range(chunk, range, pipeline_.mine(), 1);
      final_bytes_(range.end);
    };
    return pipeline_.run(num_chunks(), fill, drain);
  }

  // Every rank reduces its part of each chunk, and writes the result over its input in the other ranks' slots, so each
  // rank reads the rest from its own slot. Moving bytes between processors is the slow part. This way a cache line
  // moves to the rank that reduces it and back, and nowhere else. Both times it is prefetched for writing: the
  // receiving processor then owns it, and needs no further message to write the result, or the next chunk, into it.
  // If only the root needs the result, it is written to the root's slot alone.
  Status run_in_parts() {
    const uint64_t ranks = static_cast<uint64_t>(pipeline_.ranks());
    const uint64_t mine = static_cast<uint64_t>(pipeline_.mine());
    auto fill = [&](uint64_t chunk) {
      for (uint64_t part = 0; part < ranks; ++part) {
        if (part != mine) copy_in(range_of(chunk, part, ranks), pipeline_.slot(pipeline_.mine(), chunk));
      }
    };
    const bool is_for_all = root_ == kEveryRank;
    auto reduce_mine = [&](uint64_t chunk) {
      reduce_range(chunk, range_of(chunk, mine, ranks), is_for_all ? 0 : root_, is_for_all ? pipeline_.ranks() : 1);
    };
    auto drain = [&](uint64_t chunk) {
      for (uint64_t part = 0; part < ranks && gets_result(); ++part) {
        if (part != mine) copy_out(range_of(chunk, part, ranks), pipeline_.slot(pipeline_.mine(), chunk));
      }
      final_bytes_(range_of(chunk, 0, 1).end);
    };
    return pipeline_.run(num_chunks(), fill, reduce_mine, drain);
  }

  // A part of a chunk, in the stream and in a slot.
  struct Range {
    uint64_t begin, end, in_slot;
  };

  bool gets_result() const { return root_ == kEveryRank || root_ == pipeline_.mine(); }

  uint64_t num_chunks() const { return (batch_.num_bytes() + chunk_bytes_ - 1) / chunk_bytes_; }

  Range range_of(uint64_t chunk, uint64_t part, uint64_t parts) const {
    uint64_t begin = chunk * chunk_bytes_;
    uint64_t length = std::min(chunk_bytes_, batch_.num_bytes() - begin);
    uint64_t share = align((length + parts - 1) / parts);
    uint64_t from = std::min(part * share, length);
    uint64_t to = std::min(from + share, length);
    return Range{begin + from, begin + to, from};
  }

  void copy_in(const Range& range, char* slot) {
    batch_.for_each_piece(range.begin, range.end,
                          [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                            put_in(slot + range.in_slot + at, segment.input + from, num_bytes);
                          });
  }

  void copy_out(const Range& range, const char* slot) {
    batch_.for_each_piece(range.begin, range.end,
                          [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                            const uint64_t next = from + pipeline_.depth() * chunk_bytes_;  // copied in next
                            const bool is_here = next + num_bytes <= segment.num_bytes;
                            take_out(segment.output + from, slot + range.in_slot + at, num_bytes,
                                     is_here ? segment.input + next : nullptr);
                          });
  }

  // Reduces a range of the stream for `num_receivers` ranks from `receiver` on: into this rank's tensors, and into the
  // slots of the others.
  void reduce_range(uint64_t chunk, const Range& range, int receiver, int num_receivers) {
    batch_.for_each_piece(
        range.begin, range.end, [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
          for (int rank = 0; rank < pipeline_.ranks(); ++rank) {
            char* piece = pipeline_.slot(rank, chunk) + range.in_slot + at;
            const bool is_mine = rank == pipeline_.mine();
            sources_[static_cast<size_t>(rank)] = is_mine ? segment.input + from : piece;
            if (rank < receiver || rank >= receiver + num_receivers) continue;
            dsts_[static_cast<size_t>(rank - receiver)] = is_mine ? segment.output + from : piece;
          }
          const size_t count = num_bytes / size_of(segment.reduction.dtype);
          reduce(segment.reduction, Arrays{sources_.data(), pipeline_.ranks(), dsts_.data(), num_receivers, count});
        });
  }

  const Batch& batch_;
  const int root_;
  ChunkPipeline& pipeline_;
  const FinalBytes& final_bytes_;
  std::vector<const void*> sources_;  // by rank
  std::vector<void*> dsts_;
  uint64_t chunk_bytes_ = 0;
};

}  // namespace

Status allreduce(const Batch& batch, ChunkPipeline* pipeline, const FinalBytes& final_bytes) {
  return Allreduce(batch, kEveryRank, pipeline, final_bytes).run();
}

Status reduce_to(const Batch& batch, int root, ChunkPipeline* pipeline, const FinalBytes& final_bytes) {
  return Allreduce(batch, root, pipeline, final_bytes).run();
}

}  // namespace hvl
