#include "cuda/cuda_api.h"

#include <dlfcn.h>

namespace hvl {

namespace {

Status find_all(const SharedLibrary& library, CudaApi* api) {
  Status status;
  const auto find = [&](const char* symbol, auto** function) {
    if (status.ok()) status = library.find(symbol, function);
  };
  find("cuInit", &api->cuInit);
  find("cuDriverGetVersion", &api->cuDriverGetVersion);
  find("cuGetErrorName", &api->cuGetErrorName);
  find("cuGetErrorString", &api->cuGetErrorString);
  find("cuDeviceGetCount", &api->cuDeviceGetCount);
  find("cuDeviceGet", &api->cuDeviceGet);
  find("cuDeviceGetUuid_v2", &api->cuDeviceGetUuid);  // _v2: MIG instances of a GPU have different UUIDs
  find("cuDevicePrimaryCtxRetain", &api->cuDevicePrimaryCtxRetain);
  find("cuDevicePrimaryCtxRelease_v2", &api->cuDevicePrimaryCtxRelease);
  find("cuCtxPushCurrent_v2", &api->cuCtxPushCurrent);
  find("cuCtxPopCurrent_v2", &api->cuCtxPopCurrent);
  find("cuCtxGetStreamPriorityRange", &api->cuCtxGetStreamPriorityRange);
  find("cuStreamCreateWithPriority", &api->cuStreamCreateWithPriority);
  find("cuStreamDestroy_v2", &api->cuStreamDestroy);
  find("cuStreamWaitEvent", &api->cuStreamWaitEvent);
  find("cuStreamIsCapturing", &api->cuStreamIsCapturing);
  find("cuThreadExchangeStreamCaptureMode", &api->cuThreadExchangeStreamCaptureMode);
  find("cuEventCreate", &api->cuEventCreate);
  find("cuEventRecord", &api->cuEventRecord);
  find("cuEventQuery", &api->cuEventQuery);
  find("cuEventDestroy_v2", &api->cuEventDestroy);
  find("cuMemHostAlloc", &api->cuMemHostAlloc);
  find("cuMemFreeHost", &api->cuMemFreeHost);
  find("cuMemcpyDtoHAsync_v2", &api->cuMemcpyDtoHAsync);
  find("cuMemcpyHtoDAsync_v2", &api->cuMemcpyHtoDAsync);
  find("cuMemcpyDtoDAsync_v2", &api->cuMemcpyDtoDAsync);
  return status;
}

}  // namespace

Status SharedLibrary::open(const std::string& file, SharedLibrary* library) {
  library->file_ = file;
  library->handle_ = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library->handle_ != nullptr) return Status();
  const char* why = dlerror();
  return Status(HVL_RESOURCES, file + " cannot be opened" + (why != nullptr ? std::string(": ") + why : ""));
}

Status SharedLibrary::find_address(const char* symbol, void** address) const {
  *address = dlsym(handle_, symbol);
  if (*address != nullptr) return Status();
  return Status(HVL_RESOURCES, file_ + " has no function " + symbol + ": it is too old, or another library");
}

Status CudaApi::load(const std::string& file, CudaApi* api) {
  SharedLibrary library;
  Status status = SharedLibrary::open(file.empty() ? "libcuda.so.1" : file, &library);
  return status.ok() ? find_all(library, api) : status;
}

Status CudaApi::init() const { return check(cuInit(0), "the CUDA driver cannot be initialised"); }

std::string CudaApi::describe(CudaResult error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(error, &name) != kCudaSuccess || name == nullptr) return "CUDA error " + std::to_string(error);
  if (cuGetErrorString(error, &text) != kCudaSuccess || text == nullptr) return name;
  return std::string(name) + " (" + text + ")";
}

Status CudaApi::check(CudaResult result, const char* what) const {
  return result == kCudaSuccess ? Status() : Status(HVL_RESOURCES, std::string(what) + ": " + describe(result));
}

int CudaApi::version() const {
  int version = 0;
  return cuDriverGetVersion(&version) == kCudaSuccess ? version : 0;
}

}  // namespace hvl
