// What this process finds of the libraries for GPUs, for who asks what this installation can do.
#pragma once

#include <string>

#include "hvl.h"

namespace hvl {

// Files as in GpuOptions. CUDA is initialised only if GPUs are to be counted.
hvl_gpu_libraries find_gpu_libraries(const std::string& cuda_library, const std::string& nccl_library,
                                     bool counts_gpus);

}  // namespace hvl
