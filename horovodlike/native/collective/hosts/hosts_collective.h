// A collective of a team that has members on several hosts.
#pragma once

#include <memory>

#include "collective/data_plane.h"
#include "collective/hosts/host_exchange.h"
#include "collective/hosts/host_layout.h"
#include "collective/shm/chunk_pipeline.h"
#include "transport/transport.h"

namespace hvl {

// The resources of a collective: for the part within the host and the part between hosts.
struct HostsContext {
  const Layout* layout;
  ChunkPipeline* pipeline;  // shared by this host's members
  Mesh* mesh;
  HostExchange::Memory* memory;
};

// A collective under way. run() returns when it is done. HVL_IN_PROGRESS: interrupted; the next call continues from
// there.
class HostsCollective {
 public:
  explicit HostsCollective(const HostsContext& context) : context_(context) {}
  virtual ~HostsCollective() = default;
  HostsCollective(const HostsCollective&) = delete;
  HostsCollective& operator=(const HostsCollective&) = delete;

  virtual Status run() = 0;

 protected:
  const Layout& layout() const { return *context_.layout; }
  ChunkPipeline& pipeline() const { return *context_.pipeline; }
  Mesh& mesh() const { return *context_.mesh; }
  bool is_alone_here() const { return layout().here().size() == 1; }

  // Calls advance(&moved), which does everything possible without waiting, until is_done().
  template <typename Advance, typename IsDone>
  Status run_until(IsDone&& is_done, Advance&& advance) {
    Status status;
    const auto can_continue = [&] {
      bool moved = false;
      status = advance(&moved);
      return moved || !status.ok() || is_done();
    };
    while (!is_done()) {
      if (can_continue()) {
        if (!status.ok()) return status;
        continue;
      }
      const Status waited = pipeline().waiter()->wait(can_continue, [](int) { return false; }, &mesh());
      if (!waited.ok()) return waited;
      if (!status.ok()) return status;
    }
    return Status();
  }
  // Waits until the mesh has moved everything that was queued.
  Status finish_transfers() {
    return run_until([this] { return mesh().is_idle(); }, [this](bool* moved) { return mesh().progress(moved); });
  }

  const HostsContext context_;
};

// The collectives. The arguments must live as long as the result.

// Each host reduces the data of its members, in the order of ranks; then the hosts' results are reduced, in the order
// of hosts. Minifloats are also rounded between the two steps. Data that cannot be reduced in these two steps (integers
// that are divided or scaled: the intermediate result may not fit) is exchanged as it is, and reduced in the order of
// ranks in one step.
std::unique_ptr<HostsCollective> make_hosts_allreduce(const HostsContext& context, const Batch& batch,
                                                      const FinalBytes& final_bytes);
// The result has the same bits as an allreduce. For a small batch, the root receives the data of all hosts and reduces
// it. For a large one, each member reduces a block (reducescatter), and sends the result to the root.
std::unique_ptr<HostsCollective> make_hosts_reduce(const HostsContext& context, const Batch& batch, int root,
                                                   const FinalBytes& final_bytes);
// The result has the same bits as an allreduce.
std::unique_ptr<HostsCollective> make_hosts_reducescatter(const HostsContext& context, const Scatter& scatter);
// Along a binomial tree of hosts, from one member of each to the next; then within each host.
std::unique_ptr<HostsCollective> make_hosts_broadcast(const HostsContext& context, const Batch& batch, int root,
                                                      const FinalBytes& final_bytes);
// Each block goes once to each other host, and from there to the host's members.
std::unique_ptr<HostsCollective> make_hosts_allgather(const HostsContext& context, const Gather& gather);
// Each block is sent from its sender to its receiver.
std::unique_ptr<HostsCollective> make_hosts_alltoall(const HostsContext& context, const Exchange& exchange);

}  // namespace hvl
