// Broadcast of a batch through the shared memory of one host.
#pragma once

#include "collective/chunk_pipeline.h"
#include "transport/data_plane.h"

namespace hvl {

// The root fills its slots, the others copy out of them.
Status broadcast(const Batch& batch, int root, ChunkPipeline* pipeline, const FinalBytes& final_bytes);

}  // namespace hvl
