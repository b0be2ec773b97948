// The shared memory of one host: its layout, and a mapping of it.
//
//   header | one RankBlock per local rank | the log's ring | request rings, one per local rank | one StackBlock per
//   local rank | slots | ring buffers of messages, one per pair of ranks and direction | their MessageBlocks
//
// All words that more than one process touches are atomics, each on the cache line of the one rank that writes it;
// counters that several ranks increase are the exception.
// Memory of zeros is a valid initial state.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/types.h"
#include "shm/doorbell.h"

namespace hvl {

constexpr size_t kCacheLine = 64;
constexpr size_t kPage = 4096;
constexpr size_t kLogRingBytes = 256 << 10;
constexpr size_t kRequestRingBytes = 64 << 10;

struct alignas(kCacheLine) HostHeader {
  char token[kCacheLine];  // Python recognises the segment by it before hvl_init

  // The job is broken: 0 no, 1 the text is being written, 2 the text is complete. The first rank to break it writes.
  alignas(kCacheLine) std::atomic<uint32_t> broken;
  char broken_text[32 << 10];  // room for a report with the stacks of several ranks

  // The number of times that the coordinator has announced that it is about to end a stalled job and collects a report
  // on the missing ranks. It shows that the coordinator itself is not stuck. Written by the engine of local rank 0.
  alignas(kCacheLine) std::atomic<uint32_t> inquiries;

  // When bytes last moved between hosts in a collective that takes long, by the host's clock: as seen by the ranks of
  // this host, and as its leader has heard from other hosts. See HostMemory::moved_at().
  alignas(kCacheLine) std::atomic<uint64_t> moved_here;
  std::atomic<uint64_t> moved_elsewhere;
};

// A rank's progress in the chunks of the collectives that it takes part in; see collective/shm/chunk_pipeline.h.
struct Progress {
  alignas(kCacheLine) std::atomic<uint64_t> filled;   // chunks whose bytes are in this rank's slots
  alignas(kCacheLine) std::atomic<uint64_t> reduced;  // chunks of which this rank's part is reduced
  alignas(kCacheLine) std::atomic<uint64_t> drained;  // chunks that this rank has finished with
};

struct alignas(kCacheLine) RankBlock {
  Doorbell doorbell;
  alignas(kCacheLine) std::atomic<uint32_t> left;  // 1: this rank has shut down cleanly
  // 1: its engine has ended. Memory of its requests may be reused: others do not use data that they copy from there,
  // and copy nothing to it.
  std::atomic<uint32_t> ended;
  std::atomic<uint32_t> waits;                     // threads of this rank that wait for a result
  std::atomic<uint32_t> queued;                    // requests of this rank that its engine has not announced yet
  alignas(kCacheLine) std::atomic<int> processor;  // the number of the last one that ran this rank's engine, plus 1
  alignas(kCacheLine) std::atomic<uint64_t> log_read;
  alignas(kCacheLine) std::atomic<uint64_t> requests_written;
  alignas(kCacheLine) std::atomic<uint64_t> requests_read;
  Progress progress;
  alignas(kCacheLine) std::atomic<uint64_t> message_moves;  // notify_message() calls by other ranks
  // Written by the coordinator's engine: the nanoseconds that others have waited for this rank, and how often.
  alignas(kCacheLine) std::atomic<uint64_t> waited_for;
  std::atomic<int64_t> times_late;
};

// A stack-dump request of the coordinator and a rank's answer; see observe/stack_dump.h.
struct alignas(kCacheLine) StackBlock {
  // The number of requests so far. The asked rank sets the top bit when it leaves.
  std::atomic<uint32_t> asked;
  // The request that `text` answers. The rank writes this and the fields below, the coordinator then reads them.
  alignas(kCacheLine) std::atomic<uint32_t> answered;
  uint32_t length;
  char text[HVL_STACK_BYTES];
};

// A large message that both of its ranks copy; see p2p/joint_copy.h.
struct JointCopyBlock {
  alignas(kCacheLine) std::atomic<uint64_t> id;  // written by the receiver, like `address` (there) and `num_bytes`
  std::atomic<uint64_t> address;
  std::atomic<uint64_t> num_bytes;
  alignas(kCacheLine) std::atomic<uint64_t> next;      // the copy and its next piece to claim; written by both
  alignas(kCacheLine) std::atomic<uint64_t> num_sent;  // bytes of ended pieces of the sender; written by it
  std::atomic<uint32_t> has_failed;                    // written by the sender; the receiver resets both
};

// The positions up to which a ring buffer of messages has been written and read; see p2p/shm_stream.h.
struct MessageBlock {
  alignas(kCacheLine) std::atomic<uint64_t> written;     // by the sender
  alignas(kCacheLine) std::atomic<uint64_t> read;        // by the receiver
  alignas(kCacheLine) std::atomic<uint32_t> is_copying;  // 1: the sender writes to the receiver's memory; by the sender
  JointCopyBlock joint_copy;
};

struct MessageRing {
  MessageBlock* block;
  char* bytes;
  size_t capacity;  // a power of two
};

struct HostShape {
  int ranks = 1;
  int64_t slot_bytes = 0;
  int slot_depth = 0;
};

class HostMemory {
 public:
  static size_t bytes_needed(const HostShape& shape);

  // Maps `fd`, which the caller may close afterwards.
  static Status map(int fd, const HostShape& shape, std::shared_ptr<HostMemory>* memory);
  // Memory of this process alone, for ranks that are threads.
  static std::shared_ptr<HostMemory> anonymous(const HostShape& shape);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  const HostShape& shape() const { return shape_; }
  HostHeader& header() { return *reinterpret_cast<HostHeader*>(base_); }
  RankBlock& rank(int local_rank) { return *reinterpret_cast<RankBlock*>(base_ + rank_offset(local_rank)); }
  std::atomic<uint64_t>& log_written() {
    return *reinterpret_cast<std::atomic<uint64_t>*>(base_ + rank_offset(shape_.ranks));
  }
  char* log_ring() { return base_ + round_up(rank_offset(shape_.ranks) + kCacheLine, kPage); }
  char* request_ring(int local_rank) {
    return log_ring() + kLogRingBytes + static_cast<size_t>(local_rank) * kRequestRingBytes;
  }
  StackBlock& stacks(int local_rank) { return reinterpret_cast<StackBlock*>(request_ring(shape_.ranks))[local_rank]; }
  char* slot(int local_rank, uint64_t chunk) {
    const size_t depth = static_cast<size_t>(shape_.slot_depth);
    const size_t index = static_cast<size_t>(local_rank) * depth + chunk % depth;
    return reinterpret_cast<char*>(&stacks(shape_.ranks)) + index * static_cast<size_t>(shape_.slot_bytes);
  }
  // The ring of messages from one local rank to another one.
  MessageRing message_ring(int from, int to);

  // Has ranks notified through these pipes (by local rank) from now on, because they also wait for sockets. Must be
  // called before any rank's engine runs.
  Status set_pipes(const std::vector<int>& pipes);
  // Closes a forked child's copies of the pipes. The child must notify no rank any more.
  void close_pipes();
  // Notifies a local rank that this rank has changed a message ring or a joint copy between the two.
  void notify_message(int local_rank, WakeReason why) {
    rank(local_rank).message_moves.fetch_add(1);
    notify(local_rank, why);
  }
  void notify(int local_rank, WakeReason why) {
    rank(local_rank).doorbell.notify(why, pipes_.empty() ? -1 : pipes_[static_cast<size_t>(local_rank)]);
  }

  // Marks the job as broken and wakes all ranks. The text of the first call on the host is kept.
  void break_job(const std::string& text);
  bool is_broken() { return header().broken.load() != 0; }
  std::string broken_text();
  // A rank that waits has not waited in vain before this time: a long transfer between hosts was under way.
  uint64_t moved_at() { return std::max(header().moved_here.load(), header().moved_elsewhere.load()); }
  void notify_all_but(int local_rank, WakeReason why);
  bool another_waits(int local_rank) {
    for (int peer = 0; peer < shape_.ranks; ++peer) {
      if (peer != local_rank && rank(peer).waits.load() != 0) return true;
    }
    return false;
  }
  // Wakes the other ranks that defer requests.
  void notify_deferring_ranks(int local_rank);

 private:
  HostMemory(char* base, size_t bytes, const HostShape& shape) : base_(base), bytes_(bytes), shape_(shape) {}
  static size_t message_ring_bytes(int ranks);
  static size_t message_rings_offset(const HostShape& shape);
  static size_t rank_offset(int local_rank) {
    return round_up(sizeof(HostHeader), kCacheLine) + static_cast<size_t>(local_rank) * sizeof(RankBlock);
  }

  char* base_;
  size_t bytes_;
  HostShape shape_;
  std::vector<int> pipes_;  // duplicates of the descriptors, closed in the destructor
};

}  // namespace hvl
