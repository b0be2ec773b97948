// Allgather of blocks of different lengths through the shared memory of one host.
#pragma once

#include "collective/chunk_pipeline.h"
#include "transport/data_plane.h"

namespace hvl {

// Chunk c carries the c-th piece of every rank's block; ranks with short blocks have empty pieces at the end.
Status allgather(const Gather& gather, ChunkPipeline* pipeline);

}  // namespace hvl
