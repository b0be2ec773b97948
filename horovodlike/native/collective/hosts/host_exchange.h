// The part of an allreduce between hosts: chunk by chunk, the hosts' data is reduced over all of them.
//
// A chunk is divided into lanes and a lane into one part for each host. For each part, the member of the lane on its
// host receives the data of the other hosts (scatter), reduces all in the order of hosts, and sends them the result
// (gather). So as few bytes as in a ring allreduce are on the wire, in two steps, and the bits do not depend on how the
// stream was cut. Several chunks are under way at a time, in an order that is the same on both ends of every stream: S0
// S1 .. G0 Sd G1 .. with `depth` scatters before the first gather.
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

  // `staging_depth`: 0: the tensors' own memory is reduced; only where each host has one member. Else this rank's lanes
  // of that many chunks are in `memory`, which must live as long as this.
  HostExchange(const Batch& batch, const Layout& layout, const ChunkCut& cut, uint64_t depth, uint64_t staging_depth,
               Memory* memory, Mesh* mesh);

  // The memory for this host's part of a lane: write it before add_source(); it is final when the chunk is complete.
  char* staging(uint64_t chunk, size_t lane_index) {
    return staging_ + ((chunk % staging_depth_) * layout_.lanes.size() + lane_index) * lane_bytes_;
  }
  // This host's part of the next chunk is in place.
  void add_source() { ++num_sources_; }
  // Chunks that are final, from the first on.
  uint64_t num_complete() const { return num_complete_; }
  const ChunkCut& cut() const { return cut_; }
  const Sockets* sockets() const { return mesh_; }

  // Does what can be done without waiting; sets *moved if anything was.
  Status advance(bool* moved);

 private:
  // The ends of a chunk's lane in the streams to and from one other host.
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
