// The data plane of a job of several hosts: shared memory within each, a mesh between them.
#pragma once

#include <memory>
#include <vector>

#include "collective/hosts/hosts_collective.h"
#include "collective/shm/shm_data_plane.h"

namespace hvl {

class HostsDataPlane : public DataPlane {
 public:
  // `hosts`: the host number of each rank. `mesh` has all data connections of this rank.
  HostsDataPlane(std::shared_ptr<HostMemory> memory, int rank, int local_rank, std::vector<int> hosts,
                 std::unique_ptr<Mesh> mesh, Waiter* waiter);

  void begin(TeamPtr team, uint64_t number) override;
  Status allreduce(const Batch& batch, const FinalBytes& final_bytes) override;
  Status reduce_to(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status allgather(const Gather& gather) override;
  Status reducescatter(const Scatter& scatter) override;
  Status alltoall(const Exchange& exchange) override;
  hvl_transport transport() const override { return is_here() ? HVL_SHARED_MEMORY : HVL_TCP; }
  void close_in_child() override { mesh_->close_in_child(); }

 private:
  // Runs the collective that make() returns, or continues the interrupted one.
  template <typename Make>
  Status run(Make&& make);
  bool is_here() const { return layout_->num_hosts() == 1; }

  const int rank_;
  const std::vector<int> hosts_;
  const std::unique_ptr<Mesh> mesh_;
  ChunkPipeline pipeline_;
  HostExchange::Memory memory_;
  FinalBytes final_bytes_;          // the latest call's: calls that continue a collective give new ones
  std::unique_ptr<Layout> layout_;  // the last team's
  std::unique_ptr<HostsCollective> collective_;
};

}  // namespace hvl
