#include <algorithm>
#include <cstring>

#include "collective/hosts/hierarchical_reduction.h"
#include "collective/hosts/hosts_collective.h"

namespace hvl {

namespace {

// Every member receives its block from all others, and reduces it in the order of ranks. Each round moves one piece of
// each block, so that the received data needs little memory.
class InOneStep : public HostsCollective {
 public:
  InOneStep(const HostsContext& context, const Scatter& scatter)
      : HostsCollective(context), scatter_(scatter), team_(*layout().team), sources_(team_.size()) {
    for (const Block<const char>& block : scatter.blocks) longest_ = std::max(longest_, block.num_bytes);
    piece_ = std::max(kMinPiece, std::min(kMaxPiece, kScratch / team_.size() / kAlignment * kAlignment));
    piece_ = std::min(piece_, align(longest_));
    scratch_ = context.memory->scratch.reserve(piece_ * team_.size());
  }

  Status run() override {
    for (; round_ * piece_ < longest_; ++round_) {
      if (part_ == nullptr) begin_round();
      Status status = part_->run();
      if (!status.ok()) return status;
      part_ = nullptr;
      reduce_piece();
    }
    return Status();
  }

 private:
  static constexpr uint64_t kMinPiece = 4 << 10;
  static constexpr uint64_t kMaxPiece = 256 << 10;
  static constexpr uint64_t kScratch = 4 << 20;

  Block<const char> piece_of(size_t place) const {
    const Block<const char>& block = scatter_.blocks[place];
    const uint64_t begin = std::min(round_ * piece_, block.num_bytes);
    return {block.data + begin, std::min(piece_, block.num_bytes - begin)};
  }

  void begin_round() {
    exchange_ = Exchange{{}, {}, 0};
    const uint64_t mine = piece_of(team_.mine).num_bytes;
    for (size_t place = 0; place < team_.size(); ++place) {
      const Block<const char> piece = piece_of(place);
      exchange_.longest = std::max(exchange_.longest, piece.num_bytes);
      exchange_.sent.push_back(piece);
      exchange_.received.push_back({scratch_ + place * piece_, mine});
    }
    // This member's own piece is not exchanged.
    exchange_.sent[team_.mine].num_bytes = 0;
    exchange_.received[team_.mine].num_bytes = 0;
    part_ = make_hosts_alltoall(context_, exchange_);
  }

  void reduce_piece() {
    const Block<const char> mine = piece_of(team_.mine);
    if (mine.num_bytes == 0) return;
    for (size_t place = 0; place < team_.size(); ++place) {
      sources_[place] = place == team_.mine ? mine.data : scratch_ + place * piece_;
    }
    void* dst = scatter_.output + round_ * piece_;
    const size_t count = mine.num_bytes / size_of(scatter_.reduction.dtype);
    reduce(scatter_.reduction, Arrays{sources_.data(), static_cast<int>(sources_.size()), &dst, 1, count});
  }

  const Scatter& scatter_;
  const Team& team_;
  uint64_t longest_ = 0;
  uint64_t piece_ = 0;
  char* scratch_ = nullptr;
  uint64_t round_ = 0;
  Exchange exchange_{{}, {}, 0};
  std::unique_ptr<HostsCollective> part_;
  std::vector<const void*> sources_;
};

// The exchange between hosts, chunk by chunk: a chunk is a piece of each block. For each block, one member of each host
// sends its host's data to the member that the block is for, which reduces it in the order of hosts.
class BlockExchange {
 public:
  BlockExchange(const HostsContext& context, const Scatter& scatter, uint64_t piece, uint64_t depth)
      : layout_(*context.layout),
        mesh_(context.mesh),
        scatter_(scatter),
        piece_(piece),
        depth_(depth),
        sources_(layout_.num_hosts()),
        send_ends_(depth * layout_.team->size()),
        receive_ends_(depth * layout_.num_hosts()) {
    for (size_t host = 0; host < layout_.num_hosts(); ++host) {
      for (size_t place = 0; place < layout_.members[host].size(); ++place) {
        const bool is_mine = place % layout_.here().size() == layout_.place;
        if (is_mine) held_.push_back(static_cast<size_t>(layout_.team->place_of(layout_.members[host][place])));
      }
    }
    std::sort(held_.begin(), held_.end());
    staging_ = context.memory->staging.reserve(depth * held_.size() * piece);
    scratch_ = context.memory->scratch.reserve(depth * layout_.num_hosts() * piece);
  }

  // The blocks, by place in the team, for which this rank reduces its host's data; its own block is one of them.
  const std::vector<size_t>& held() const { return held_; }
  char* staging(uint64_t chunk, size_t index) { return staging_ + ((chunk % depth_) * held_.size() + index) * piece_; }
  uint64_t piece_bytes(size_t place, uint64_t chunk) const {
    const uint64_t num_bytes = scatter_.blocks[place].num_bytes;
    return std::min(piece_, num_bytes - std::min(chunk * piece_, num_bytes));
  }

  // As in HostExchange.
  const Sockets* sockets() const { return mesh_; }
  uint64_t num_complete() const { return num_complete_; }
  void add_source() {
    const uint64_t chunk = num_sources_++;
    const size_t mine = layout_.team->mine;
    for (size_t index = 0; index < held_.size(); ++index) {
      const size_t place = held_[index];
      if (place == mine) {
        own_ = index;
      } else {
        const int rank = layout_.team->ranks[place];
        const bool is_here = std::binary_search(layout_.here().begin(), layout_.here().end(), rank);
        if (!is_here) send_end(chunk, place) = mesh_->send(rank, 0, staging(chunk, index), piece_bytes(place, chunk));
      }
    }
    for (size_t host = 0; host < layout_.num_hosts(); ++host) {
      if (host == layout_.mine) continue;
      receive_end(chunk, host) =
          mesh_->receive(layout_.partner_on(host), 0, scratch(chunk, host), piece_bytes(mine, chunk));
    }
  }
  Status advance(bool* moved) {
    Status status = mesh_->progress(moved);
    while (status.ok() && num_complete_ < num_sources_ && is_here(num_complete_)) {
      reduce_piece(num_complete_++);
      *moved = true;
    }
    return status;
  }

 private:
  uint64_t& send_end(uint64_t chunk, size_t place) {
    return send_ends_[(chunk % depth_) * layout_.team->size() + place];
  }
  uint64_t& receive_end(uint64_t chunk, size_t host) {
    return receive_ends_[(chunk % depth_) * layout_.num_hosts() + host];
  }
  char* scratch(uint64_t chunk, size_t host) {
    return scratch_ + ((chunk % depth_) * layout_.num_hosts() + host) * piece_;
  }

  // True if all data of the chunk has been received and sent: its staging memory can be reused.
  bool is_here(uint64_t chunk) {
    for (size_t host = 0; host < layout_.num_hosts(); ++host) {
      if (host != layout_.mine && !mesh_->has_received(layout_.partner_on(host), 0, receive_end(chunk, host))) {
        return false;
      }
    }
    for (size_t place : held_) {
      const int rank = layout_.team->ranks[place];
      const bool is_here = std::binary_search(layout_.here().begin(), layout_.here().end(), rank);
      if (!is_here && !mesh_->has_sent(rank, 0, send_end(chunk, place))) return false;
    }
    return true;
  }

  void reduce_piece(uint64_t chunk) {
    const uint64_t num_bytes = piece_bytes(layout_.team->mine, chunk);
    if (num_bytes == 0) return;
    for (size_t host = 0; host < sources_.size(); ++host) {
      sources_[host] = host == layout_.mine ? staging(chunk, own_) : scratch(chunk, host);
    }
    const Reduction& whole = scatter_.reduction;
    void* dst = scatter_.output + chunk * piece_;
    reduce(layout_.is_flat() ? whole : between_hosts(whole, layout_.num_lanes),
           Arrays{sources_.data(), static_cast<int>(sources_.size()), &dst, 1, num_bytes / size_of(whole.dtype)});
  }

  const Layout& layout_;
  Mesh* const mesh_;
  const Scatter& scatter_;
  const uint64_t piece_, depth_;
  std::vector<size_t> held_;
  size_t own_ = 0;  // the index of this rank's block in held_
  char* staging_ = nullptr;
  char* scratch_ = nullptr;
  std::vector<const void*> sources_;  // by host
  std::vector<uint64_t> send_ends_, receive_ends_;
  uint64_t num_sources_ = 0, num_complete_ = 0;
};

class InTwoSteps : public HostsCollective {
 public:
  InTwoSteps(const HostsContext& context, const Scatter& scatter)
      : HostsCollective(context),
        scatter_(scatter),
        piece_(piece_of(context, scatter)),
        exchange_(context, scatter, piece_, pipeline().depth()),
        sources_(layout().here().size()) {
    for (const Block<const char>& block : scatter.blocks) longest_ = std::max(longest_, block.num_bytes);
  }

  Status run() override {
    const std::vector<size_t>& held = exchange_.held();
    const int here = static_cast<int>(layout().place);
    auto fill = [&](uint64_t chunk) {
      if (is_alone_here()) return;
      char* slot = pipeline().slot(here, chunk);
      for (size_t place = 0; place < scatter_.blocks.size(); ++place) {
        const uint64_t num_bytes = exchange_.piece_bytes(place, chunk);
        if (num_bytes == 0 || std::binary_search(held.begin(), held.end(), place)) continue;
        memcpy(slot + place * piece_, scatter_.blocks[place].data + chunk * piece_, num_bytes);
      }
    };
    auto combine = [&](uint64_t chunk) {
      for (size_t index = 0; index < held.size(); ++index)
        combine_block(chunk, held[index], exchange_.staging(chunk, index));
    };
    auto nothing = [](uint64_t) {};
    return pipeline().run((longest_ + piece_ - 1) / piece_, fill, combine, &exchange_, nothing, nothing);
  }

 private:
  // The bytes of a piece: a slot holds one piece of each block.
  static uint64_t piece_of(const HostsContext& context, const Scatter& scatter) {
    return context.pipeline->slot_bytes() / scatter.blocks.size() / kAlignment * kAlignment;
  }

  void combine_block(uint64_t chunk, size_t place, char* to) {
    const uint64_t num_bytes = exchange_.piece_bytes(place, chunk);
    if (num_bytes == 0) return;
    const char* own = scatter_.blocks[place].data + chunk * piece_;
    if (layout().is_flat()) {
      memcpy(to, own, num_bytes);
      return;
    }
    for (size_t member = 0; member < sources_.size(); ++member) {
      sources_[member] =
          member == layout().place ? own : pipeline().slot(static_cast<int>(member), chunk) + place * piece_;
    }
    void* dst = to;
    const size_t count = num_bytes / size_of(scatter_.reduction.dtype);
    reduce(within_host(scatter_.reduction, layout().num_lanes),
           Arrays{sources_.data(), static_cast<int>(sources_.size()), &dst, 1, count});
  }

  const Scatter& scatter_;
  const uint64_t piece_;
  BlockExchange exchange_;
  std::vector<const void*> sources_;  // by place on this host
  uint64_t longest_ = 0;
};

}  // namespace

std::unique_ptr<HostsCollective> make_hosts_reducescatter(const HostsContext& context, const Scatter& scatter) {
  const bool fits = context.pipeline->slot_bytes() / scatter.blocks.size() >= kAlignment;
  const bool in_one_step = !context.layout->is_flat() && is_in_one_step(scatter.reduction);
  if (in_one_step || !fits) return std::make_unique<InOneStep>(context, scatter);
  return std::make_unique<InTwoSteps>(context, scatter);
}

}  // namespace hvl
