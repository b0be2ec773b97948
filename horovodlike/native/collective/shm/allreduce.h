// Allreduce of a batch through the shared memory of one host.
#pragma once

#include "collective/data_plane.h"
#include "collective/shm/chunk_pipeline.h"

namespace hvl {

// Small batches: every rank copies all its bytes in and reduces everything itself. Large ones: every rank reduces its
// part of each chunk, straight from its own tensors and the others' slots. Either way element by element in rank
// order, so the bits do not depend on which way was taken.
Status allreduce(const Batch& batch, ChunkPipeline* pipeline, const FinalBytes& final_bytes);

}  // namespace hvl
