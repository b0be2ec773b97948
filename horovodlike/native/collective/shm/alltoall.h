// Alltoall through the shared memory of one host.
#pragma once

#include "collective/data_plane.h"
#include "collective/shm/chunk_pipeline.h"

namespace hvl {

// Chunk c carries the c-th piece of every block; a slot has a place for each receiver. Short blocks have empty pieces
// at the end.
Status alltoall(const Exchange& exchange, ChunkPipeline* pipeline);

}  // namespace hvl
