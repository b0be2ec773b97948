#include "nccl/gpu_libraries.h"

#include <algorithm>
#include <cstring>

#include "cuda/cuda_api.h"
#include "nccl/nccl_api.h"

namespace hvl {

namespace {

// Cut off where it does not fit; the end is 0 already.
template <size_t kSize>
void put(const std::string& text, char (&to)[kSize]) {
  memcpy(to, text.data(), std::min(text.size(), kSize - 1));
}

}  // namespace

hvl_gpu_libraries find_gpu_libraries(const std::string& cuda_library, const std::string& nccl_library,
                                     bool counts_gpus) {
  hvl_gpu_libraries found{};
  CudaApi cuda{};
  Status status = CudaApi::load(cuda_library, &cuda);
  if (status.ok() && counts_gpus) status = cuda.init();
  if (status.ok() && counts_gpus) {
    status = cuda.check(cuda.cuDeviceGetCount(&found.num_gpus), "the GPUs cannot be counted");
  }
  if (status.ok()) found.cuda_version = cuda.version();
  put(status.message(), found.why_no_cuda);
  NcclApi nccl{};
  status = NcclApi::load(nccl_library, &nccl);
  if (status.ok()) found.nccl_version = nccl.version();
  put(status.message(), found.why_no_nccl);
  return found;
}

}  // namespace hvl
