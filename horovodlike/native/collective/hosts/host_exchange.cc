#include "collective/hosts/host_exchange.h"

#include <algorithm>

#include "collective/hosts/hierarchical_reduction.h"

namespace hvl {

ChunkRange ChunkCut::lane(uint64_t chunk, size_t lane) const {
  const uint64_t begin = chunk * chunk_bytes_;
  const uint64_t length = std::min(chunk_bytes_, num_bytes_ - begin);
  const uint64_t each = share(length, num_lanes_);
  const uint64_t from = std::min(lane * each, length);
  const uint64_t to = std::min(from + each, length);
  return ChunkRange{begin + from, begin + to, from};
}

ChunkRange ChunkCut::part(uint64_t chunk, size_t lane_number, size_t part) const {
  const ChunkRange whole = lane(chunk, lane_number);
  const uint64_t length = whole.end - whole.begin;
  const uint64_t each = share(length, num_parts_);
  const uint64_t from = std::min(part * each, length);
  const uint64_t to = std::min(from + each, length);
  return ChunkRange{whole.begin + from, whole.begin + to, whole.in_chunk + from};
}

HostExchange::HostExchange(const Batch& batch, const Layout& layout, const ChunkCut& cut, uint64_t depth,
                           uint64_t staging_depth, Memory* memory, Mesh* mesh)
    : batch_(batch),
      layout_(layout),
      cut_(cut),
      depth_(depth),
      staging_depth_(staging_depth),
      lane_bytes_(cut.longest_lane()),
      part_bytes_(cut.longest_part()),
      mesh_(mesh),
      staging_(memory->staging.reserve(staging_depth * layout.lanes.size() * lane_bytes_)),
      scratch_(memory->scratch.reserve(scratch_depth() * layout.lanes.size() * layout.num_hosts() * part_bytes_)),
      ends_(window() * layout.lanes.size() * layout.num_hosts()),
      sources_(layout.num_hosts()) {
  if (staging_depth == 0) num_sources_ = cut.num_chunks();
}

// Calls visit(source, result, offset in the part, bytes, reduction) for each piece of a part.
template <typename Visit>
void HostExchange::for_each_piece(uint64_t chunk, size_t lane_index, size_t part, Visit&& visit) {
  const size_t lane = layout_.lanes[lane_index];
  const ChunkRange range = cut_.part(chunk, lane, part);
  char* staged = nullptr;
  if (staging_depth_ > 0) staged = staging(chunk, lane_index) + (range.begin - cut_.lane(chunk, lane).begin);
  batch_.for_each_piece(range.begin, range.end,
                        [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                          const char* source = staged != nullptr ? staged + at : segment.input + from;
                          char* result = staged != nullptr ? staged + at : segment.output + from;
                          visit(source, result, at, num_bytes, segment.reduction);
                        });
}

template <typename Check>
bool HostExchange::for_all_peers(uint64_t chunk, Check&& check) {
  for (size_t index = 0; index < layout_.lanes.size(); ++index) {
    for (size_t host = 0; host < layout_.num_hosts(); ++host) {
      if (host == layout_.mine) continue;
      if (!check(layout_.owner(host, layout_.lanes[index]), ends(chunk, index, host))) return false;
    }
  }
  return true;
}

void HostExchange::post_scatter(uint64_t chunk) {
  for (size_t index = 0; index < layout_.lanes.size(); ++index) {
    for (size_t host = 0; host < layout_.num_hosts(); ++host) {
      if (host == layout_.mine) continue;
      const int peer = layout_.owner(host, layout_.lanes[index]);
      for_each_piece(chunk, index, host,
                     [&](const char* source, char*, uint64_t, uint64_t num_bytes, const Reduction&) {
                       mesh_->send(peer, chunk, source, num_bytes);
                     });
      Ends& end = ends(chunk, index, host);
      end = Ends();
      char* to = scratch(chunk, index, host);
      for_each_piece(chunk, index, layout_.mine,
                     [&](const char*, char*, uint64_t at, uint64_t num_bytes, const Reduction&) {
                       end.scattered = mesh_->receive(peer, chunk, to + at, num_bytes);
                     });
    }
  }
}

void HostExchange::post_gather(uint64_t chunk) {
  for (size_t index = 0; index < layout_.lanes.size(); ++index) {
    for (size_t host = 0; host < layout_.num_hosts(); ++host) {
      if (host == layout_.mine) continue;
      const int peer = layout_.owner(host, layout_.lanes[index]);
      Ends& end = ends(chunk, index, host);
      for_each_piece(chunk, index, layout_.mine,
                     [&](const char*, const char* result, uint64_t, uint64_t num_bytes, const Reduction&) {
                       end.gathered_out = mesh_->send(peer, chunk, result, num_bytes);
                     });
      for_each_piece(chunk, index, host,
                     [&](const char*, char* result, uint64_t, uint64_t num_bytes, const Reduction&) {
                       end.gathered_in = mesh_->receive(peer, chunk, result, num_bytes);
                     });
    }
  }
}

bool HostExchange::has_come(uint64_t chunk) {
  return for_all_peers(chunk,
                       [&](int peer, const Ends& end) { return mesh_->has_received(peer, chunk, end.scattered); });
}

bool HostExchange::is_final(uint64_t chunk) {
  return for_all_peers(chunk, [&](int peer, const Ends& end) {
    return mesh_->has_received(peer, chunk, end.gathered_in) && mesh_->has_sent(peer, chunk, end.gathered_out);
  });
}

void HostExchange::reduce_parts(uint64_t chunk) {
  for (size_t index = 0; index < layout_.lanes.size(); ++index) {
    for_each_piece(chunk, index, layout_.mine,
                   [&](const char* source, char* result, uint64_t at, uint64_t num_bytes, const Reduction& whole) {
                     for (size_t host = 0; host < layout_.num_hosts(); ++host) {
                       sources_[host] = host == layout_.mine ? source : scratch(chunk, index, host) + at;
                     }
                     const Reduction reduction = staging_depth_ > 0 ? between_hosts(whole, layout_.num_lanes) : whole;
                     void* dst = result;
                     const size_t count = num_bytes / size_of(reduction.dtype);
                     reduce(reduction, Arrays{sources_.data(), static_cast<int>(sources_.size()), &dst, 1, count});
                   });
  }
}

bool HostExchange::post() {
  const uint64_t count = cut_.num_chunks();
  bool posted = false;
  for (;;) {
    const bool gathers =
        num_gathered_ < num_scattered_ && (num_scattered_ == count || num_gathered_ + depth_ == num_scattered_);
    if (gathers && num_gathered_ < num_reduced_) {
      post_gather(num_gathered_++);
    } else if (!gathers && num_scattered_ < std::min({count, num_sources_, num_complete_ + window()})) {
      post_scatter(num_scattered_++);
    } else {
      return posted;
    }
    posted = true;
  }
}

Status HostExchange::advance(bool* moved) {
  *moved |= post();
  Status status = mesh_->progress(moved);
  if (!status.ok()) return status;
  while (num_reduced_ < num_scattered_ && has_come(num_reduced_)) {
    reduce_parts(num_reduced_++);
    post();
    *moved = true;
  }
  while (num_complete_ < num_gathered_ && is_final(num_complete_)) {
    ++num_complete_;
    *moved = true;
  }
  return Status();
}

}  // namespace hvl
