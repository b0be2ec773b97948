#include "collective/shm/shm_data_plane.h"

#include "collective/shm/allgather.h"
#include "collective/shm/allreduce.h"
#include "collective/shm/alltoall.h"
#include "collective/shm/broadcast.h"
#include "collective/shm/reducescatter.h"

namespace hvl {

Status ShmDataPlane::allreduce(const Batch& batch, const FinalBytes& final_bytes) {
  return hvl::allreduce(batch, &pipeline_, final_bytes);
}

Status ShmDataPlane::broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) {
  return hvl::broadcast(batch, root, &pipeline_, final_bytes);
}

Status ShmDataPlane::allgather(const Gather& gather) { return hvl::allgather(gather, &pipeline_); }

Status ShmDataPlane::reducescatter(const Scatter& scatter) { return hvl::reducescatter(scatter, &pipeline_); }

Status ShmDataPlane::alltoall(const Exchange& exchange) { return hvl::alltoall(exchange, &pipeline_); }

}  // namespace hvl
