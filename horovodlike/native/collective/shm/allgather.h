// Allgather of blocks of different lengths through the shared memory of one host.
#pragma once

#include "collective/data_plane.h"
#include "collective/shm/chunk_pipeline.h"

namespace hvl {

// Chunk c carries the c-th piece of every rank's block; ranks with short blocks have empty pieces at the end.
Status allgather(const Gather& gather, ChunkPipeline* pipeline);

}  // namespace hvl
