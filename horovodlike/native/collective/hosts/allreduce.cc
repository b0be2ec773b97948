#include <algorithm>
#include <cstring>

#include "collective/blocks.h"
#include "collective/hosts/hierarchical_reduction.h"
#include "collective/hosts/hosts_collective.h"

namespace hvl {

namespace {

// Up to this size each member receives the data of all other hosts in one step: faster than two with fewer bytes.
constexpr uint64_t kSmallBatch = 32 << 10;
// A HostExchange that uses no slots: the limits of a chunk's part for each host and of a chunk, and its `depth`.
constexpr uint64_t kMaxPart = 256 << 10;
constexpr uint64_t kMinPart = 8 << 10;
constexpr uint64_t kMaxChunk = 2 << 20;
constexpr uint64_t kDepth = 4;
constexpr int kEveryRank = -1;

class Base : public HostsCollective {
 public:
  Base(const HostsContext& context, const Batch& batch, const FinalBytes& final_bytes)
      : HostsCollective(context), batch_(batch), final_bytes_(final_bytes) {}

 protected:
  // Reduces a range of the stream over this host's members, into `to`. The data of the other members is in their slots.
  void reduce_here(const ChunkRange& range, uint64_t chunk, char* to) {
    sources_.resize(layout().here().size());
    batch_.for_each_piece(
        range.begin, range.end, [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
          for (size_t place = 0; place < sources_.size(); ++place) {
            sources_[place] = place == layout().place
                                  ? segment.input + from
                                  : pipeline().slot(static_cast<int>(place), chunk) + range.in_chunk + at;
          }
          void* dst = to + at;
          const size_t count = num_bytes / size_of(segment.reduction.dtype);
          reduce(within_host(segment.reduction, layout().num_lanes),
                 Arrays{sources_.data(), static_cast<int>(sources_.size()), &dst, 1, count});
        });
  }

  void copy_in(const ChunkRange& range, char* chunk) {
    batch_.for_each_piece(range.begin, range.end,
                          [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                            memcpy(chunk + range.in_chunk + at, segment.input + from, num_bytes);
                          });
  }

  void copy_out(const ChunkRange& range, const char* from_range) {
    batch_.for_each_piece(range.begin, range.end,
                          [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
                            memcpy(segment.output + from, from_range + at, num_bytes);
                          });
  }

  const Batch& batch_;
  const FinalBytes& final_bytes_;
  std::vector<const void*> sources_;
};

class Small : public Base {
 public:
  // `root`: the place of the only member that receives the result; or kEveryRank.
  Small(const HostsContext& context, const Batch& batch, int root, const FinalBytes& final_bytes)
      : Base(context, batch, final_bytes),
        root_(root == kEveryRank ? kEveryRank : layout().team->ranks[static_cast<size_t>(root)]) {}

  Status run() override {
    const uint64_t length = batch_.num_bytes();
    const ChunkRange all{0, length, 0};
    if (stage_ == Stage::kHere) {
      // Memory for this host's data, then for each host's: the tensors may be written before all data has been sent.
      mine_ = context_.memory->scratch.reserve(length * (1 + layout().num_hosts()));
      if (layout().is_flat()) {
        copy_in(all, mine_);
      } else {
        auto fill = [&](uint64_t chunk) { copy_in(all, pipeline().slot(pipeline().mine(), chunk)); };
        auto drain = [&](uint64_t chunk) { reduce_here(all, chunk, mine_); };
        Status status = pipeline().run(1, fill, drain);
        if (!status.ok()) return status;
      }
      exchange(length);
      stage_ = Stage::kBetween;
    }
    Status status = finish_transfers();
    if (status.ok() && gets_result(layout().here()[layout().place])) reduce_hosts(length);
    return status;
  }

 private:
  enum class Stage { kHere, kBetween };

  bool gets_result(int rank) const { return root_ == kEveryRank || root_ == rank; }

  char* of_host(size_t host, uint64_t length) { return host == layout().mine ? mine_ : mine_ + length * (1 + host); }

  void exchange(uint64_t length) {
    for (size_t host = 0; host < layout().num_hosts(); ++host) {
      if (host == layout().mine) continue;
      if (gets_result(layout().here()[layout().place])) {
        mesh().receive(layout().partner_on(host), 0, of_host(host, length), length);
      }
      const std::vector<int>& members = layout().members[host];
      for (size_t place = layout().place; place < members.size(); place += layout().here().size()) {
        if (gets_result(members[place])) mesh().send(members[place], 0, mine_, length);
      }
    }
  }

  void reduce_hosts(uint64_t length) {
    sources_.resize(layout().num_hosts());
    batch_.for_each_piece(0, length, [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t num_bytes) {
      for (size_t host = 0; host < sources_.size(); ++host) sources_[host] = of_host(host, length) + at;
      const Reduction reduction =
          layout().is_flat() ? segment.reduction : between_hosts(segment.reduction, layout().num_lanes);
      void* dst = segment.output + from;
      const size_t count = num_bytes / size_of(reduction.dtype);
      reduce(reduction, Arrays{sources_.data(), static_cast<int>(sources_.size()), &dst, 1, count});
    });
    final_bytes_(length);
  }

  const int root_;  // a rank, or kEveryRank
  Stage stage_ = Stage::kHere;
  char* mine_ = nullptr;
};

// One member on each host: data is sent from, and received into, the tensors' own memory.
class Flat : public Base {
 public:
  Flat(const HostsContext& context, const Batch& batch, const FinalBytes& final_bytes)
      : Base(context, batch, final_bytes),
        exchange_(batch_, layout(), ChunkCut(batch.num_bytes(), chunk_bytes(), 1, layout().num_hosts()), kDepth, 0,
                  context.memory, context.mesh) {}

  Status run() override {
    const uint64_t count = exchange_.cut().num_chunks();
    return run_until([&] { return exchange_.num_complete() == count; },
                     [&](bool* moved) {
                       const uint64_t before = exchange_.num_complete();
                       const Status status = exchange_.advance(moved);
                       const uint64_t complete = exchange_.num_complete();
                       if (complete != before) final_bytes_(exchange_.cut().end_of(complete - 1));
                       return status;
                     });
  }

 private:
  uint64_t chunk_bytes() const {
    const uint64_t hosts = layout().num_hosts();
    const uint64_t most = std::min(kMaxPart, std::min(kMaxChunk, batch_.num_bytes() / kDepth) / hosts);
    return hosts * std::max(kMinPart, most / kAlignment * kAlignment);
  }

  HostExchange exchange_;
};

// Several members on some host: each reduces its lanes of the data in the slots, and exchanges them with other hosts.
class InLanes : public Base {
 public:
  InLanes(const HostsContext& context, const Batch& batch, const FinalBytes& final_bytes)
      : Base(context, batch, final_bytes),
        exchange_(batch_, layout(),
                  ChunkCut(batch.num_bytes(), pipeline().slot_bytes(), layout().num_lanes, layout().num_hosts()),
                  std::max<uint64_t>(1, pipeline().depth() - 1), pipeline().depth(), context.memory, context.mesh) {}

  Status run() override {
    const ChunkCut& cut = exchange_.cut();
    const auto is_mine = [&](size_t lane) { return lane % layout().here().size() == layout().place; };
    const int here = static_cast<int>(layout().place);
    auto fill = [&](uint64_t chunk) {
      if (is_alone_here()) return;
      for (size_t lane = 0; lane < layout().num_lanes; ++lane) {
        if (!is_mine(lane)) copy_in(cut.lane(chunk, lane), pipeline().slot(here, chunk));
      }
    };
    auto combine = [&](uint64_t chunk) {
      for (size_t index = 0; index < layout().lanes.size(); ++index) {
        reduce_here(cut.lane(chunk, layout().lanes[index]), chunk, exchange_.staging(chunk, index));
      }
    };
    auto spread = [&](uint64_t chunk) {
      for (size_t index = 0; index < layout().lanes.size(); ++index) {
        const ChunkRange range = cut.lane(chunk, layout().lanes[index]);
        const char* result = exchange_.staging(chunk, index);
        for (int place = 0; place < pipeline().ranks(); ++place) {
          if (place != here) memcpy(pipeline().slot(place, chunk) + range.in_chunk, result, range.end - range.begin);
        }
        copy_out(range, result);
      }
    };
    auto drain = [&](uint64_t chunk) {
      for (size_t lane = 0; lane < layout().num_lanes; ++lane) {
        const ChunkRange range = cut.lane(chunk, lane);
        if (!is_mine(lane)) copy_out(range, pipeline().slot(here, chunk) + range.in_chunk);
      }
      final_bytes_(cut.end_of(chunk));
    };
    return pipeline().run(cut.num_chunks(), fill, combine, &exchange_, spread, drain);
  }

 private:
  HostExchange exchange_;
};

// Segment by segment: each member reduces its block of the segment over all members, and all receive the result, or
// only the root does.
class InBlocks : public HostsCollective {
 public:
  InBlocks(const HostsContext& context, const Batch& batch, int root)
      : HostsCollective(context), segments_(batch.segments()), root_(root) {}

  Status run() override {
    for (; next_ < segments_.size(); ++next_, part_ = nullptr) {
      const Segment& segment = segments_[next_];
      if (part_ == nullptr) begin_scatter(segment);
      if (!gathers_) {
        Status status = part_->run();
        if (!status.ok()) return status;
        begin_gather(segment);
        gathers_ = true;
      }
      Status status = part_->run();
      if (!status.ok()) return status;
      gathers_ = false;
    }
    return Status();
  }

 private:
  void begin_scatter(const Segment& segment) {
    scatter_ = in_blocks(segment, layout().team->size());
    const Block<const char>& mine = scatter_.blocks[layout().team->mine];
    const bool has_output = root_ == kEveryRank || root_ == static_cast<int>(layout().team->mine);
    scatter_.output =
        has_output ? segment.output + (mine.data - segment.input) : context_.memory->block.reserve(mine.num_bytes);
    part_ = make_hosts_reducescatter(context_, scatter_);
  }

  void begin_gather(const Segment& segment) {
    if (root_ == kEveryRank) {
      gather_ = Gather{scatter_.output, {}};
      for (const Block<const char>& block : scatter_.blocks) {
        gather_.blocks.push_back({segment.output + (block.data - segment.input), block.num_bytes});
      }
      part_ = make_hosts_allgather(context_, gather_);
    } else {
      to_root_ =
          gather_to(static_cast<size_t>(root_), layout().team->mine, scatter_.output, segment.output, scatter_.blocks);
      part_ = make_hosts_alltoall(context_, to_root_);
    }
  }

  const std::vector<Segment> segments_;
  const int root_;
  size_t next_ = 0;
  bool gathers_ = false;
  Scatter scatter_;
  Gather gather_;
  Exchange to_root_{{}, {}, 0};
  std::unique_ptr<HostsCollective> part_;
};

// An allreduce in which some segments (`exact_`) are reduced in one step. The others have the same bits as in a
// separate batch.
class Mixed : public HostsCollective {
 public:
  Mixed(const HostsContext& context, const Batch& batch, const FinalBytes& final_bytes)
      : HostsCollective(context), length_(batch.num_bytes()), final_bytes_(final_bytes) {
    for (const Segment& each : batch.segments()) {
      (is_in_one_step(each.reduction) ? exact_ : others_).add(each.input, each.output, each.num_bytes, each.reduction);
    }
  }

  Status run() override {
    if (stage_ == 0) {
      part_ = std::make_unique<InBlocks>(context_, exact_, kEveryRank);
      stage_ = 1;
    }
    Status status = part_->run();
    if (!status.ok()) return status;
    if (stage_ == 1 && others_.num_bytes() > 0) {
      part_ = make_hosts_allreduce(context_, others_, ignored_);
      stage_ = 2;
      status = part_->run();
      if (!status.ok()) return status;
    }
    final_bytes_(length_);
    return Status();
  }

 private:
  const uint64_t length_;
  const FinalBytes& final_bytes_;
  const FinalBytes ignored_ = [](uint64_t) {};
  Batch exact_, others_;
  int stage_ = 0;
  std::unique_ptr<HostsCollective> part_;
};

bool is_small(const HostsContext& context, const Batch& batch) {
  return batch.num_bytes() <= std::min(kSmallBatch, context.pipeline->slot_bytes());
}

bool needs_blocks(const HostsContext& context, const Batch& batch) {
  const auto is_exact = [](const Segment& segment) { return is_in_one_step(segment.reduction); };
  return !context.layout->is_flat() && std::any_of(batch.segments().begin(), batch.segments().end(), is_exact);
}

}  // namespace

std::unique_ptr<HostsCollective> make_hosts_allreduce(const HostsContext& context, const Batch& batch,
                                                      const FinalBytes& final_bytes) {
  if (needs_blocks(context, batch)) return std::make_unique<Mixed>(context, batch, final_bytes);
  if (is_small(context, batch)) return std::make_unique<Small>(context, batch, kEveryRank, final_bytes);
  if (context.layout->is_flat()) return std::make_unique<Flat>(context, batch, final_bytes);
  return std::make_unique<InLanes>(context, batch, final_bytes);
}

std::unique_ptr<HostsCollective> make_hosts_reduce(const HostsContext& context, const Batch& batch, int root,
                                                   const FinalBytes& final_bytes) {
  if (is_small(context, batch) && !needs_blocks(context, batch)) {
    return std::make_unique<Small>(context, batch, root, final_bytes);
  }
  return std::make_unique<InBlocks>(context, batch, root);
}

}  // namespace hvl
