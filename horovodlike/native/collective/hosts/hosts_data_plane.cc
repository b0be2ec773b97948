#include "collective/hosts/hosts_data_plane.h"

#include <utility>

namespace hvl {

HostsDataPlane::HostsDataPlane(std::shared_ptr<HostMemory> memory, int rank, int local_rank, std::vector<int> hosts,
                               std::unique_ptr<Mesh> mesh, Waiter* waiter)
    : rank_(rank), hosts_(std::move(hosts)), mesh_(std::move(mesh)), pipeline_(std::move(memory), local_rank, waiter) {}

void HostsDataPlane::begin(TeamPtr team, uint64_t number) {
  if (layout_ == nullptr || layout_->team != team) layout_ = std::make_unique<Layout>(std::move(team), hosts_, rank_);
  pipeline_.begin(layout_->local, number);
}

template <typename Make>
Status HostsDataPlane::run(Make&& make) {
  if (collective_ == nullptr) collective_ = make(HostsContext{layout_.get(), &pipeline_, mesh_.get(), &memory_});
  Status status = collective_->run();
  if (status.code() != HVL_IN_PROGRESS) collective_ = nullptr;
  return status;
}

Status HostsDataPlane::allreduce(const Batch& batch, const FinalBytes& final_bytes) {
  if (is_here()) return hvl::allreduce(batch, &pipeline_, final_bytes);
  final_bytes_ = final_bytes;
  return run([&](const HostsContext& context) { return make_hosts_allreduce(context, batch, final_bytes_); });
}

Status HostsDataPlane::reduce_to(const Batch& batch, int root, const FinalBytes& final_bytes) {
  if (is_here()) return hvl::reduce_to(batch, root, &pipeline_, final_bytes);
  final_bytes_ = final_bytes;
  return run([&](const HostsContext& context) { return make_hosts_reduce(context, batch, root, final_bytes_); });
}

Status HostsDataPlane::broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) {
  if (is_here()) return hvl::broadcast(batch, root, &pipeline_, final_bytes);
  final_bytes_ = final_bytes;
  return run([&](const HostsContext& context) { return make_hosts_broadcast(context, batch, root, final_bytes_); });
}

Status HostsDataPlane::allgather(const Gather& gather) {
  if (is_here()) return hvl::allgather(gather, &pipeline_);
  return run([&](const HostsContext& context) { return make_hosts_allgather(context, gather); });
}

Status HostsDataPlane::reducescatter(const Scatter& scatter) {
  if (is_here()) return hvl::reducescatter(scatter, &pipeline_);
  return run([&](const HostsContext& context) { return make_hosts_reducescatter(context, scatter); });
}

Status HostsDataPlane::alltoall(const Exchange& exchange) {
  if (is_here()) return hvl::alltoall(exchange, &pipeline_);
  return run([&](const HostsContext& context) { return make_hosts_alltoall(context, exchange); });
}

}  // namespace hvl
