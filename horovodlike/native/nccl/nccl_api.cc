#include "nccl/nccl_api.h"

#include "cuda/shared_library.h"

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

}  // namespace hvl
