// Alltoall through the shared memory of one host.
#pragma once

#include "collective/chunk_pipeline.h"
#include "transport/data_plane.h"

namespace hvl {

// Chunk c carries the c-th piece of every block; a slot has a place for each receiver. Short blocks have empty pieces
// at the end.
Status alltoall(const Exchange& exchange, ChunkPipeline* pipeline);

}  // namespace hvl
