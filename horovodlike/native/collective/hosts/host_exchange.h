// The inter-host part of an allreduce: it reduces the data of all hosts, chunk by chunk.
//
// A chunk is divided into lanes and a lane into one part for each host. Each part belongs to one host: that host's
// owner of the lane receives the data of the other hosts (scatter), reduces all data in the order of hosts, and sends
// the result to the other hosts (gather). So two steps send as few bytes as a ring allreduce, and the bits do not
// depend on how the stream was cut. Several chunks are under way at a time, in the same order on both ends of every
// connection: S0 S1 .. G0 Sd G1 .. with `depth` scatters before the first gather.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "base/memory.h"
#include "collective/batch.h"
#include "collective/hosts/host_layout.h"
#include "transport/transport.h"

namespace hvl {

// A piece of the stream, and its position in the chunk.
struct ChunkRange {
  uint64_t begin, end, in_chunk;
};

// Cuts the stream: chunks into lanes, lanes into parts.
class ChunkCut {
 public:
  ChunkCut(uint64_t num_bytes, uint64_t chunk_bytes, size_t num_lanes, size_t num_parts)
      : num_bytes_(num_bytes), chunk_bytes_(chunk_bytes), num_lanes_(num_lanes), num_parts_(num_parts) {}

  uint64_t num_chunks() const { return (num_bytes_ + chunk_bytes_ - 1) / chunk_bytes_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint64_t end_of(uint64_t chunk) const { return std::min(num_bytes_, (chunk + 1) * chunk_bytes_); }
  ChunkRange lane(uint64_t chunk, size_t lane) const;
  ChunkRange part(uint64_t chunk, size_t lane, size_t part) const;
  uint64_t longest_lane() const { return share(std::min(chunk_bytes_, num_bytes_), num_lanes_); }
  uint64_t longest_part() const { return share(longest_lane(), num_parts_); }

 private:
  static uint64_t share(uint64_t bytes, size_t parts) { return align((bytes + parts - 1) / parts); }

  uint64_t num_bytes_, chunk_bytes_;
  size_t num_lanes_, num_parts_;
};

class HostExchange {
 public:
  struct Memory {
    Buffer staging, scratch, block;
  };

  // `staging_depth`: the number of chunks whose lanes `memory` holds for this rank. 0: the tensors' own memory is used,
  // which needs one member on each host. `memory` must live as long as this object.
  HostExchange(const Batch& batch, const Layout& layout, const ChunkCut& cut, uint64_t depth, uint64_t staging_depth,
               Memory* memory, Mesh* mesh);

  // The memory for this host's data of a lane: write it before add_source(). Complete chunks have the result there.
  char* staging(uint64_t chunk, size_t lane_index) {
    return staging_ + ((chunk % staging_depth_) * layout_.lanes.size() + lane_index) * lane_bytes_;
  }
  // Call it when this host's data of the next chunk is in staging().
  void add_source() { ++num_sources_; }
  // The number of chunks that are final; they are the first ones.
  uint64_t num_complete() const { return num_complete_; }
  const ChunkCut& cut() const { return cut_; }
  const Sockets* sockets() const { return mesh_; }

  // Moves data as far as possible without waiting; sets *moved if any moved.
  Status advance(bool* moved);

 private:
  // The positions at which a chunk's lane ends in the streams to and from one other host.
  struct Ends {
    uint64_t scattered = 0, gathered_out = 0, gathered_in = 0;
  };

  uint64_t scratch_depth() const { return depth_ + 1; }  // chunks that are not reduced yet
  uint64_t window() const { return 4 * depth_; }         // chunks that are not final yet
  bool post();
  void post_scatter(uint64_t chunk);
  void post_gather(uint64_t chunk);
  bool has_come(uint64_t chunk);
  bool is_final(uint64_t chunk);
  void reduce_parts(uint64_t chunk);
  template <typename Visit>
  void for_each_piece(uint64_t chunk, size_t lane_index, size_t part, Visit&& visit);
  template <typename Check>
  bool for_all_peers(uint64_t chunk, Check&& check);
  Ends& ends(uint64_t chunk, size_t lane_index, size_t host) {
    return ends_[((chunk % window()) * layout_.lanes.size() + lane_index) * layout_.num_hosts() + host];
  }
  char* scratch(uint64_t chunk, size_t lane_index, size_t host) {
    return scratch_ +
           (((chunk % scratch_depth()) * layout_.lanes.size() + lane_index) * layout_.num_hosts() + host) * part_bytes_;
  }

  const Batch& batch_;
  const Layout& layout_;
  const ChunkCut cut_;
  const uint64_t depth_, staging_depth_;
  const uint64_t lane_bytes_, part_bytes_;
  Mesh* const mesh_;
  char* const staging_;
  char* const scratch_;
  std::vector<Ends> ends_;
  std::vector<const void*> sources_;  // by host
  uint64_t num_sources_ = 0, num_scattered_ = 0, num_reduced_ = 0, num_gathered_ = 0, num_complete_ = 0;
};

}  // namespace hvl
