// Reducescatter through the shared memory of one host.
#pragma once

#include "collective/data_plane.h"
#include "collective/shm/chunk_pipeline.h"

namespace hvl {

// Chunk c carries the c-th piece of every rank's block; ranks with short blocks have empty pieces at the end. Each rank
// copies the others' pieces in and reduces its own, in the order of the ranks: the bits are those of an allreduce.
Status reducescatter(const Scatter& scatter, ChunkPipeline* pipeline);

}  // namespace hvl
