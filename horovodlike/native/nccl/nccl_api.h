// The functions of NCCL that the engine calls, found in libnccl.so.2 at run time.
//
// Types and values follow NCCL's documentation (docs.nvidia.com/deeplearning/nccl), from version 2.14 on: it is the
// first with non-blocking communicators.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"
#include "cuda/cuda_api.h"

namespace hvl {

using NcclComm = void*;

enum NcclResult : int {
  kNcclSuccess = 0,
  kNcclUnhandledCudaError = 1,
  kNcclSystemError = 2,
  kNcclInternalError = 3,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7
};

enum NcclDataType : int {
  kNcclInt8 = 0,
  kNcclUint8 = 1,
  kNcclInt32 = 2,
  kNcclInt64 = 4,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBfloat16 = 9
};

// ncclRedOpCreatePreMulSum makes others.
using NcclRedOp = int;
constexpr NcclRedOp kNcclSum = 0;
constexpr NcclRedOp kNcclProd = 1;
constexpr NcclRedOp kNcclMax = 2;
constexpr NcclRedOp kNcclMin = 3;
constexpr NcclRedOp kNcclAvg = 4;

constexpr int kNcclScalarHostImmediate = 1;

struct NcclUniqueId {
  char internal[128];
};

// As of version 2.14. Later versions have more members, which take their defaults if the version is this one.
struct NcclConfig {
  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

struct NcclApi {
  NcclResult (*ncclGetVersion)(int* version);
  NcclResult (*ncclGetUniqueId)(NcclUniqueId* id);
  const char* (*ncclGetErrorString)(NcclResult result);
  const char* (*ncclGetLastError)(NcclComm comm);
  NcclResult (*ncclCommInitRankConfig)(NcclComm* comm, int size, NcclUniqueId id, int rank, NcclConfig* config);
  NcclResult (*ncclCommGetAsyncError)(NcclComm comm, NcclResult* state);
  NcclResult (*ncclCommFinalize)(NcclComm comm);
  NcclResult (*ncclCommDestroy)(NcclComm comm);
  NcclResult (*ncclCommAbort)(NcclComm comm);
  NcclResult (*ncclRedOpCreatePreMulSum)(NcclRedOp* op, void* scalar, NcclDataType dtype, int residence, NcclComm comm);
  NcclResult (*ncclRedOpDestroy)(NcclRedOp op, NcclComm comm);
  NcclResult (*ncclAllReduce)(const void* sent, void* received, size_t count, NcclDataType dtype, NcclRedOp op,
                              NcclComm comm, CudaStream stream);
  NcclResult (*ncclReduce)(const void* sent, void* received, size_t count, NcclDataType dtype, NcclRedOp op, int root,
                           NcclComm comm, CudaStream stream);
  NcclResult (*ncclReduceScatter)(const void* sent, void* received, size_t received_count, NcclDataType dtype,
                                  NcclRedOp op, NcclComm comm, CudaStream stream);
  NcclResult (*ncclBroadcast)(const void* sent, void* received, size_t count, NcclDataType dtype, int root,
                              NcclComm comm, CudaStream stream);
  NcclResult (*ncclAllGather)(const void* sent, void* received, size_t sent_count, NcclDataType dtype, NcclComm comm,
                              CudaStream stream);
  NcclResult (*ncclSend)(const void* sent, size_t count, NcclDataType dtype, int peer, NcclComm comm,
                         CudaStream stream);
  NcclResult (*ncclRecv)(void* received, size_t count, NcclDataType dtype, int peer, NcclComm comm, CudaStream stream);
  NcclResult (*ncclGroupStart)();
  NcclResult (*ncclGroupEnd)();

  // Opens the library (`file` empty: libnccl.so.2) and finds all functions above. HVL_RESOURCES has the reason.
  static Status load(const std::string& file, NcclApi* api);

  // Describes a result in words. `comm` may be null.
  std::string describe(NcclResult result, NcclComm comm) const;
  // 21903 for 2.19.3; 0 if the library does not say.
  int version() const;
};

// Reports the GPU libraries that this process finds, to show users the capabilities of this installation. Files as in
// GpuOptions. CUDA is initialised only if `counts_gpus`.
hvl_gpu_libraries find_gpu_libraries(const std::string& cuda_library, const std::string& nccl_library,
                                     bool counts_gpus);

}  // namespace hvl
