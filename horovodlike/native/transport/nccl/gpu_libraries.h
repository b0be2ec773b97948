// What this process finds of the libraries for GPUs, for who asks what this installation can do.
#pragma once

#include <string>

#include "hvl.h"

namespace hvl {

// Files as in GpuOptions.
hvl_gpu_libraries find_gpu_libraries(const std::string& cuda_library, const std::string& nccl_library);

}  // namespace hvl
