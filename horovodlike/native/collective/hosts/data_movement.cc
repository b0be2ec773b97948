#include <algorithm>
#include <cstring>

#include "collective/hosts/hosts_collective.h"
#include "collective/shm/shm_data_plane.h"

namespace hvl {

namespace {

const FinalBytes kNobodyAsks = [](uint64_t) {};

class Broadcast : public HostsCollective {
 public:
  Broadcast(const HostsContext& context, const Batch& batch, int root, const FinalBytes& final_bytes)
      : HostsCollective(context), batch_(batch), final_bytes_(final_bytes) {
    const int root_rank = layout().team->ranks[static_cast<size_t>(root)];
    for (size_t host = 0; host < layout().num_hosts(); ++host) {
      const std::vector<int>& members = layout().members[host];
      receivers_.push_back(members.front());
      const auto found = std::find(members.begin(), members.end(), root_rank);
      if (found == members.end()) continue;
      root_host_ = host;
      receivers_.back() = root_rank;
    }
    // The batch to broadcast within this host: from the root's inputs, or from the outputs of the receiver.
    const bool from_input = layout().mine == root_host_;
    for (const Segment& each : batch.segments()) {
      here_.add(from_input ? each.input : each.output, each.output, each.num_bytes, each.reduction);
    }
    const int rank = layout().here()[layout().place];
    is_receiver_ = receivers_[layout().mine] == rank;
    find_neighbours();
  }

  Status run() override {
    if (stage_ == Stage::kBegin) {
      if (is_receiver_) post();
      stage_ = Stage::kBetween;
    }
    if (stage_ == Stage::kBetween) {
      // The root's host does not wait for other hosts.
      Status status = is_receiver_ && parent_ != -1 ? pass_on() : Status();
      if (!status.ok()) return status;
      stage_ = Stage::kHere;
    }
    if (stage_ == Stage::kHere) {
      const auto& here = layout().here();
      const auto receiver = std::find(here.begin(), here.end(), receivers_[layout().mine]);
      Status status = is_alone_here()
                          ? copy_here()
                          : broadcast(here_, static_cast<int>(receiver - here.begin()), &pipeline(), kNobodyAsks);
      if (!status.ok()) return status;
      stage_ = Stage::kEnd;
    }
    Status status = finish_transfers();
    if (status.ok()) final_bytes_(batch_.num_bytes());
    return status;
  }

 private:
  enum class Stage { kBegin, kBetween, kHere, kEnd };
  static constexpr uint64_t kChunk = 256 << 10;

  // Builds a binomial tree whose root is the root's host: the parent of number v is v without its lowest set bit, the
  // children are v with one bit below that bit set.
  void find_neighbours() {
    const size_t hosts = layout().num_hosts();
    const size_t mine = (layout().mine + hosts - root_host_) % hosts;
    const auto receiver_of = [&](size_t number) { return receivers_[(number + root_host_) % hosts]; };
    size_t below = 1;
    while (below < hosts && (mine & below) == 0) below <<= 1;
    if (mine != 0) parent_ = receiver_of(mine - below);
    for (below >>= 1; below > 0; below >>= 1) {
      if (mine + below < hosts) children_.push_back(receiver_of(mine + below));
    }
  }

  template <typename Visit>
  void for_each_piece(uint64_t chunk, Visit&& visit) {
    batch_.for_each_piece(
        chunk * kChunk, (chunk + 1) * kChunk,
        [&](const Segment& segment, uint64_t from, uint64_t, uint64_t num_bytes) { visit(segment, from, num_bytes); });
  }

  void send_chunk(uint64_t chunk) {
    for (int child : children_) {
      for_each_piece(chunk, [&](const Segment& segment, uint64_t from, uint64_t num_bytes) {
        mesh().send(child, chunk, (parent_ == -1 ? segment.input : segment.output) + from, num_bytes);
      });
    }
  }

  void post() {
    const uint64_t count = (batch_.num_bytes() + kChunk - 1) / kChunk;
    for (uint64_t chunk = 0; chunk < count; ++chunk) {
      if (parent_ == -1) {
        send_chunk(chunk);
        continue;
      }
      uint64_t end = 0;
      for_each_piece(chunk, [&](const Segment& segment, uint64_t from, uint64_t num_bytes) {
        end = mesh().receive(parent_, chunk, segment.output + from, num_bytes);
      });
      ends_.push_back(end);
    }
  }

  Status pass_on() {
    return run_until(
        [this] { return num_passed_ == ends_.size(); },
        [this](bool* moved) {
          const Status status = mesh().progress(moved);
          while (num_passed_ < ends_.size() && mesh().has_received(parent_, num_passed_, ends_[num_passed_])) {
            send_chunk(num_passed_++);
            *moved = true;
          }
          return status;
        });
  }

  Status copy_here() {
    for (const Segment& each : here_.segments()) {
      if (each.input != each.output) memcpy(each.output, each.input, each.num_bytes);
    }
    return Status();
  }

  const Batch& batch_;
  const FinalBytes& final_bytes_;
  Batch here_;
  std::vector<int> receivers_;  // by host: the member that receives the data from another host, or is the root
  size_t root_host_ = 0;
  bool is_receiver_ = false;
  int parent_ = -1;
  std::vector<int> children_;
  std::vector<uint64_t> ends_;  // the ends of the chunks to receive
  uint64_t num_passed_ = 0;
  Stage stage_ = Stage::kBegin;
};

class Allgather : public HostsCollective {
 public:
  Allgather(const HostsContext& context, const Gather& gather) : HostsCollective(context), gather_(gather) {}

  Status run() override {
    if (stage_ == Stage::kBegin) {
      post();
      stage_ = Stage::kBetween;
    }
    if (stage_ == Stage::kBetween) {
      Status status = finish_transfers();
      if (!status.ok()) return status;
      stage_ = Stage::kHere;
    }
    if (is_alone_here()) return Status();
    for (; next_ < held_.size(); ++next_) {
      Status status = broadcast(held_[next_], static_cast<int>(next_), &pipeline(), kNobodyAsks);
      if (!status.ok()) return status;
    }
    return Status();
  }

 private:
  enum class Stage { kBegin, kBetween, kHere };

  void post() {
    const Team& team = *layout().team;
    const Block<char>& own = gather_.blocks[team.mine];
    if (gather_.input != own.data && own.num_bytes > 0) memcpy(own.data, gather_.input, own.num_bytes);
    held_.resize(layout().here().size());
    for (size_t host = 0; host < layout().num_hosts(); ++host) {
      if (host != layout().mine) mesh().send(layout().partner_on(host), 0, gather_.input, own.num_bytes);
      for (size_t place = 0; place < layout().members[host].size(); ++place) {
        const int rank = layout().members[host][place];
        const Block<char>& block = gather_.blocks[static_cast<size_t>(team.place_of(rank))];
        const size_t holder = place % layout().here().size();
        if (block.num_bytes > 0) held_[holder].add(block.data, block.data, block.num_bytes, Reduction());
        if (host != layout().mine && holder == layout().place) mesh().receive(rank, 0, block.data, block.num_bytes);
      }
    }
  }

  const Gather& gather_;
  std::vector<Batch> held_;  // by place on this host: the blocks that this member broadcasts to the others
  size_t next_ = 0;
  Stage stage_ = Stage::kBegin;
};

// The part of a team's exchange that is between the members of this host.
Exchange within_host(const Layout& layout, const Exchange& all) {
  Exchange here{{}, {}, all.longest};
  for (int rank : layout.here()) {
    const size_t place = static_cast<size_t>(layout.team->place_of(rank));
    here.sent.push_back(all.sent[place]);
    here.received.push_back(all.received[place]);
  }
  return here;
}

class Alltoall : public HostsCollective {
 public:
  Alltoall(const HostsContext& context, const Exchange& exchange)
      : HostsCollective(context), exchange_(exchange), here_(within_host(layout(), exchange)) {}

  Status run() override {
    if (!is_posted_) {
      post();
      is_posted_ = true;
    }
    if (!is_done_here_) {
      Status status = alltoall(here_, &pipeline());
      if (!status.ok()) return status;
      is_done_here_ = true;
    }
    return finish_transfers();
  }

 private:
  void post() {
    for (size_t host = 0; host < layout().num_hosts(); ++host) {
      if (host == layout().mine) continue;
      for (int rank : layout().members[host]) {
        const size_t place = static_cast<size_t>(layout().team->place_of(rank));
        mesh().send(rank, 0, exchange_.sent[place].data, exchange_.sent[place].num_bytes);
        mesh().receive(rank, 0, exchange_.received[place].data, exchange_.received[place].num_bytes);
      }
    }
  }

  const Exchange& exchange_;
  const Exchange here_;
  bool is_posted_ = false;
  bool is_done_here_ = false;
};

}  // namespace

std::unique_ptr<HostsCollective> make_hosts_broadcast(const HostsContext& context, const Batch& batch, int root,
                                                      const FinalBytes& final_bytes) {
  return std::make_unique<Broadcast>(context, batch, root, final_bytes);
}

std::unique_ptr<HostsCollective> make_hosts_allgather(const HostsContext& context, const Gather& gather) {
  return std::make_unique<Allgather>(context, gather);
}

std::unique_ptr<HostsCollective> make_hosts_alltoall(const HostsContext& context, const Exchange& exchange) {
  return std::make_unique<Alltoall>(context, exchange);
}

}  // namespace hvl
