#include "nccl/nccl_api.h"

namespace hvl {

namespace {

constexpr int kOldestVersion = 21400;

Status find_all(const SharedLibrary& library, NcclApi* api) {
  Status status;
  const auto find = [&](const char* symbol, auto** function) {
    if (status.ok()) status = library.find(symbol, function);
  };
  find("ncclGetVersion", &api->ncclGetVersion);
  find("ncclGetUniqueId", &api->ncclGetUniqueId);
  find("ncclGetErrorString", &api->ncclGetErrorString);
  find("ncclGetLastError", &api->ncclGetLastError);
  find("ncclCommInitRankConfig", &api->ncclCommInitRankConfig);
  find("ncclCommGetAsyncError", &api->ncclCommGetAsyncError);
  find("ncclCommFinalize", &api->ncclCommFinalize);
  find("ncclCommDestroy", &api->ncclCommDestroy);
  find("ncclCommAbort", &api->ncclCommAbort);
  find("ncclRedOpCreatePreMulSum", &api->ncclRedOpCreatePreMulSum);
  find("ncclRedOpDestroy", &api->ncclRedOpDestroy);
  find("ncclAllReduce", &api->ncclAllReduce);
  find("ncclReduce", &api->ncclReduce);
  find("ncclReduceScatter", &api->ncclReduceScatter);
  find("ncclBroadcast", &api->ncclBroadcast);
  find("ncclAllGather", &api->ncclAllGather);
  find("ncclSend", &api->ncclSend);
  find("ncclRecv", &api->ncclRecv);
  find("ncclGroupStart", &api->ncclGroupStart);
  find("ncclGroupEnd", &api->ncclGroupEnd);
  return status;
}

// Copies text, truncated if it does not fit; the last byte is 0 already.
template <size_t kSize>
void put(const std::string& text, char (&to)[kSize]) {
  memcpy(to, text.data(), std::min(text.size(), kSize - 1));
}

}  // namespace

Status NcclApi::load(const std::string& file, NcclApi* api) {
  const std::string name = file.empty() ? "libnccl.so.2" : file;
  SharedLibrary library;
  Status status = SharedLibrary::open(name, &library);
  if (status.ok()) status = find_all(library, api);
  if (!status.ok() || api->version() >= kOldestVersion) return status;
  return Status(HVL_RESOURCES, name + " has the version code " + std::to_string(api->version()) +
                                   ", but NCCL 2.14 (21400) or newer is needed");
}

std::string NcclApi::describe(NcclResult result, NcclComm comm) const {
  std::string text = ncclGetErrorString(result);
  const char* details = ncclGetLastError(comm);
  return details != nullptr && details[0] != '\0' ? text + " (" + details + ")" : text;
}

int NcclApi::version() const {
  int version = 0;
  return ncclGetVersion(&version) == kNcclSuccess ? version : 0;
}

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
