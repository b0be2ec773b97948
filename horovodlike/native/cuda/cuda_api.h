// The functions of the CUDA driver that the engine calls, found in libcuda.so.1 at run time.
//
// Types, values and members' names follow the driver API's documentation (docs.nvidia.com/cuda/cuda-driver-api); the
// library exports some functions under a versioned name (cuda_api.cc).
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"

namespace hvl {

// A shared library that is opened when it is first needed: none of its headers is known at build time. It stays open as
// long as the process lives, as its threads and work may outlive every engine.
class SharedLibrary {
 public:
  // `file`: a path, or a name for the loader to look for. HVL_RESOURCES, with the reason: it cannot be opened.
  static Status open(const std::string& file, SharedLibrary* library);

  // Points `*function` to the symbol. HVL_RESOURCES: there is none of this name.
  template <typename Function>
  Status find(const char* symbol, Function** function) const {
    void* address = nullptr;
    Status status = find_address(symbol, &address);
    *function = reinterpret_cast<Function*>(address);
    return status;
  }

 private:
  Status find_address(const char* symbol, void** address) const;

  std::string file_;
  void* handle_ = nullptr;
};

using CudaResult = int;
using CudaDevice = int;
using CudaContext = void*;
using CudaStream = void*;  // null: the default stream of the current context
using CudaEvent = void*;
using CudaPointer = unsigned long long;

// The per-thread default stream: in each thread, this value means another stream.
inline const CudaStream kCudaStreamPerThread = reinterpret_cast<CudaStream>(2);

struct CudaUuid {
  char bytes[16];
};

constexpr CudaResult kCudaSuccess = 0;
constexpr CudaResult kCudaNotReady = 600;
constexpr unsigned kCudaStreamNonBlocking = 1;
constexpr unsigned kCudaEventDisableTiming = 2;
constexpr unsigned kCudaHostAllocPortable = 1;
constexpr CudaResult kCudaCaptureImplicit = 906;  // the default stream would wait for one that is captured
constexpr int kCudaNotCapturing = 0;
constexpr int kCudaCaptureModeRelaxed = 2;

struct CudaApi {
  CudaResult (*cuInit)(unsigned flags);
  CudaResult (*cuDriverGetVersion)(int* version);
  CudaResult (*cuGetErrorName)(CudaResult error, const char** text);
  CudaResult (*cuGetErrorString)(CudaResult error, const char** text);
  CudaResult (*cuDeviceGetCount)(int* count);
  CudaResult (*cuDeviceGet)(CudaDevice* device, int ordinal);
  CudaResult (*cuDeviceGetUuid)(CudaUuid* uuid, CudaDevice device);
  CudaResult (*cuDevicePrimaryCtxRetain)(CudaContext* context, CudaDevice device);
  CudaResult (*cuDevicePrimaryCtxRelease)(CudaDevice device);
  CudaResult (*cuCtxPushCurrent)(CudaContext context);
  CudaResult (*cuCtxPopCurrent)(CudaContext* context);
  CudaResult (*cuCtxGetStreamPriorityRange)(int* least, int* greatest);
  CudaResult (*cuStreamCreateWithPriority)(CudaStream* stream, unsigned flags, int priority);
  CudaResult (*cuStreamDestroy)(CudaStream stream);
  CudaResult (*cuStreamWaitEvent)(CudaStream stream, CudaEvent event, unsigned flags);
  CudaResult (*cuStreamIsCapturing)(CudaStream stream, int* status);
  CudaResult (*cuThreadExchangeStreamCaptureMode)(int* mode);
  CudaResult (*cuEventCreate)(CudaEvent* event, unsigned flags);
  CudaResult (*cuEventRecord)(CudaEvent event, CudaStream stream);
  CudaResult (*cuEventQuery)(CudaEvent event);
  CudaResult (*cuEventDestroy)(CudaEvent event);
  CudaResult (*cuMemHostAlloc)(void** memory, size_t num_bytes, unsigned flags);
  CudaResult (*cuMemFreeHost)(void* memory);
  CudaResult (*cuMemcpyDtoHAsync)(void* to, CudaPointer from, size_t num_bytes, CudaStream stream);
  CudaResult (*cuMemcpyHtoDAsync)(CudaPointer to, const void* from, size_t num_bytes, CudaStream stream);
  CudaResult (*cuMemcpyDtoDAsync)(CudaPointer to, CudaPointer from, size_t num_bytes, CudaStream stream);

  // Opens the library (`file` empty: libcuda.so.1) and finds all functions above. HVL_RESOURCES names the missing
  // library or function.
  static Status load(const std::string& file, CudaApi* api);
  // Call it before all functions but cuDriverGetVersion(). HVL_RESOURCES, with the reason: CUDA cannot be used.
  Status init() const;

  // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
  std::string describe(CudaResult error) const;
  // Returns HVL_OK, or HVL_RESOURCES with `what` and the error.
  Status check(CudaResult result, const char* what) const;
  // 12040 for 12.4; 0 if the driver does not say.
  int version() const;
};

}  // namespace hvl
