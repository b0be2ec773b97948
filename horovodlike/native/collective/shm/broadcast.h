// Broadcast of a batch through the shared memory of one host.
#pragma once

#include "collective/data_plane.h"
#include "collective/shm/chunk_pipeline.h"

namespace hvl {

// The root fills its slots, the others copy out of them.
Status broadcast(const Batch& batch, int root, ChunkPipeline* pipeline, const FinalBytes& final_bytes);

}  // namespace hvl
