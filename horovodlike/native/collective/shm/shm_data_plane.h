// The collectives of the ranks of one host, through its shared memory, and the data plane made of them.
#pragma once

#include <memory>
#include <utility>

#include "collective/data_plane.h"
#include "collective/shm/chunk_pipeline.h"

namespace hvl {

// Small batches: every rank copies all its bytes into its slot, and reduces everything itself. Large ones: every rank
// reduces its part of each chunk, straight from its own tensors and the others' slots. Both reduce element by element
// in rank order, so the bits do not depend on the choice.
Status allreduce(const Batch& batch, ChunkPipeline* pipeline, const FinalBytes& final_bytes);

// Runs the steps of an allreduce that the root needs. Only the root's tensors receive the result, with the same bits.
Status reduce_to(const Batch& batch, int root, ChunkPipeline* pipeline, const FinalBytes& final_bytes);

// The root fills its slots, and the other ranks copy out of them.
Status broadcast(const Batch& batch, int root, ChunkPipeline* pipeline, const FinalBytes& final_bytes);

// Chunk c carries the c-th piece of every rank's block; ranks with short blocks have empty pieces at the end.
Status allgather(const Gather& gather, ChunkPipeline* pipeline);

// Chunk c carries the c-th piece of every rank's block; ranks with short blocks have empty pieces at the end. Each rank
// copies the pieces of the others' blocks into its slot, and reduces its own block, in the order of the ranks: the
// result has the same bits as an allreduce.
Status reducescatter(const Scatter& scatter, ChunkPipeline* pipeline);

// Chunk c carries the c-th piece of every block; a slot has a place for each receiver. Short blocks have empty pieces
// at the end.
Status alltoall(const Exchange& exchange, ChunkPipeline* pipeline);

class ShmDataPlane : public DataPlane {
 public:
  ShmDataPlane(std::shared_ptr<HostMemory> memory, int local_rank, Waiter* waiter)
      : pipeline_(std::move(memory), local_rank, waiter) {}

  void begin(TeamPtr team, uint64_t number) override { pipeline_.begin(std::move(team), number); }
  Status allreduce(const Batch& batch, const FinalBytes& final_bytes) override {
    return hvl::allreduce(batch, &pipeline_, final_bytes);
  }
  Status reduce_to(const Batch& batch, int root, const FinalBytes& final_bytes) override {
    return hvl::reduce_to(batch, root, &pipeline_, final_bytes);
  }
  Status broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) override {
    return hvl::broadcast(batch, root, &pipeline_, final_bytes);
  }
  Status allgather(const Gather& gather) override { return hvl::allgather(gather, &pipeline_); }
  Status reducescatter(const Scatter& scatter) override { return hvl::reducescatter(scatter, &pipeline_); }
  Status alltoall(const Exchange& exchange) override { return hvl::alltoall(exchange, &pipeline_); }
  hvl_transport transport() const override { return HVL_SHARED_MEMORY; }

 private:
  ChunkPipeline pipeline_;
};

}  // namespace hvl
