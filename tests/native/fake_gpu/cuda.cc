// The driver's functions, by the names that libcuda.so.1 exports.

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "cuda/cuda_api.h"
#include "machine.h"

#pragma GCC visibility push(default)

namespace fake_gpu {

namespace {

constexpr int kInvalidValue = 1;
constexpr int kInvalidContext = 201;
constexpr int kCaptureUnsupported = 900;

// A context is its GPU.
thread_local std::vector<Gpu*> contexts;
thread_local int capture_mode = 0;  // global

// True for functions that a capture in any thread forbids to all threads, unless they have left the capture mode.
bool disturbs_captures(const std::string& function) {
  return function == "cuEventQuery" || function == "cuMemHostAlloc" || function == "cuMemFreeHost";
}

bool is_capturing(const Machine& machine) {
  return std::any_of(machine.streams.begin(), machine.streams.end(),
                     [](const Stream* each) { return each->is_capturing; });
}

// Calls `function` with the machine locked, for a call that needs a context, unless the test wants it to fail.
template <typename Function>
int with_gpu(const char* name, Function&& function, const char* whose = "") {
  Machine& machine = Machine::get();
  const std::lock_guard<std::mutex> lock(machine.mutex);
  Gpu* gpu = current_gpu(name);
  if (gpu == nullptr) return kInvalidContext;
  if (capture_mode != hvl::kCudaCaptureModeRelaxed && disturbs_captures(name) && is_capturing(machine)) {
    machine.violate(std::string(name) + " spoils the graph that is being captured");
    return kCaptureUnsupported;
  }
  const int failure = machine.call(gpu, name, whose);
  return failure != 0 ? failure : function(machine, gpu);
}

const char* whose(void* stream) {
  const std::lock_guard<std::mutex> lock(Machine::get().mutex);
  const auto* found = static_cast<const Stream*>(stream);
  return found == nullptr || found->is_tests ? " test" : " engine";
}

Stream* stream_of(Machine& machine, Gpu* gpu, void* stream) {
  if (stream == nullptr) return &gpu->default_stream;
  auto* found = static_cast<Stream*>(stream);
  if (machine.streams.count(found) == 0) {
    machine.violate("a stream is used that does not exist");
    return nullptr;
  }
  if (found->gpu != gpu) machine.violate("a stream is used with the context of another GPU");
  return found;
}

Event* event_of(Machine& machine, void* event) {
  auto* found = static_cast<Event*>(event);
  if (machine.events.count(found) != 0) return found;
  machine.violate("an event is used that does not exist");
  return nullptr;
}

int copy(const char* name, void* to, const void* from, size_t num_bytes, void* stream, const void* host) {
  return with_gpu(
      name,
      [&](Machine& machine, Gpu* gpu) {
        Stream* given = stream_of(machine, gpu, stream);
        if (given == nullptr) return kInvalidValue;
        if (host != nullptr) {
          bool is_pinned = false;
          for (void* block : machine.pinned) {
            const auto* begin = static_cast<const char*>(block);
            const size_t length = *reinterpret_cast<const size_t*>(begin - 64);
            const auto* at = static_cast<const char*>(host);
            is_pinned |= at >= begin && at + num_bytes <= begin + length;
          }
          if (!is_pinned) machine.violate("memory of the host is not pinned, so that the copy would block");
        }
        Work work;
        work.touched = {{static_cast<const char*>(to), num_bytes}, {static_cast<const char*>(from), num_bytes}};
        work.run = [=] {
          memcpy(to, from, num_bytes);
          given->queue.pop_front();
          return true;
        };
        machine.give(given, std::move(work));
        return 0;
      },
      whose(stream));
}

void* at(hvl::CudaPointer pointer) { return reinterpret_cast<void*>(pointer); }

}  // namespace

Gpu* current_gpu(const char* function) {
  if (!contexts.empty()) return contexts.back();
  Machine::get().violate(std::string(function) + " was called without a context");
  return nullptr;
}

bool may_allocate() {
  Machine& machine = Machine::get();
  const std::lock_guard<std::mutex> lock(machine.mutex);
  return capture_mode == hvl::kCudaCaptureModeRelaxed || !is_capturing(machine);
}

extern "C" {

int cuInit(unsigned) { return 0; }

int cuDriverGetVersion(int* version) {
  *version = 12080;
  return 0;
}

int cuGetErrorName(int error, const char** text) {
  *text = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OF_THE_DOUBLE";
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  *text = error == 700 ? "an illegal memory access was encountered" : "as the test wants it";
  return 0;
}

int cuDeviceGetCount(int* count) {
  const std::lock_guard<std::mutex> lock(Machine::get().mutex);
  *count = static_cast<int>(Machine::get().gpus.size());
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDeviceGetUuid_v2(hvl::CudaUuid* uuid, int device) {
  const std::lock_guard<std::mutex> lock(Machine::get().mutex);
  memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = static_cast<char>(1 + Machine::get().gpus.at(static_cast<size_t>(device))->uuid);
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  const std::lock_guard<std::mutex> lock(Machine::get().mutex);
  Gpu* gpu = Machine::get().gpus.at(static_cast<size_t>(device)).get();
  const int failure = Machine::get().call(gpu, "cuDevicePrimaryCtxRetain");
  if (failure != 0) return failure;
  ++gpu->num_retained;
  *context = gpu;
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
  const std::lock_guard<std::mutex> lock(Machine::get().mutex);
  --Machine::get().gpus.at(static_cast<size_t>(device))->num_retained;
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  contexts.push_back(static_cast<Gpu*>(context));
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = contexts.back();
  contexts.pop_back();
  if (contexts.empty() && capture_mode != 0) {
    const std::lock_guard<std::mutex> lock(Machine::get().mutex);
    Machine::get().violate("a thread keeps another capture mode than it had");
  }
  return 0;
}

int cuThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}

int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  return with_gpu("cuStreamCreateWithPriority", [&](Machine& machine, Gpu* gpu) {
    if (flags != hvl::kCudaStreamNonBlocking || priority != -5) {
      machine.violate("the engine's stream waits for others, or others come first");
    }
    auto* made = new Stream;
    made->gpu = gpu;
    machine.streams.insert(made);
    *stream = made;
    return 0;
  });
}

int cuStreamDestroy_v2(void* stream) {
  return with_gpu("cuStreamDestroy", [&](Machine& machine, Gpu* gpu) {
    Stream* found = stream_of(machine, gpu, stream);
    if (found == nullptr) return kInvalidValue;
    if (!found->queue.empty()) machine.violate("a stream is destroyed that is not done");
    machine.streams.erase(found);
    delete found;
    return 0;
  });
}

int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  return with_gpu(
      "cuStreamWaitEvent",
      [&](Machine& machine, Gpu* gpu) {
        Stream* given = stream_of(machine, gpu, stream);
        Event* awaited = event_of(machine, event);
        if (given == nullptr || awaited == nullptr) return kInvalidValue;
        if (awaited->reached == nullptr) machine.violate("a stream waits for an event that was never recorded");
        Work work;
        work.run = [given, reached = awaited->reached] {
          if (reached != nullptr && !*reached) return false;
          given->queue.pop_front();
          return true;
        };
        machine.give(given, std::move(work));
        return 0;
      },
      whose(stream));
}

int cuStreamIsCapturing(void* stream, int* status) {
  return with_gpu("cuStreamIsCapturing", [&](Machine& machine, Gpu* gpu) {
    Stream* found = stream_of(machine, gpu, stream);
    if (found == nullptr) return kInvalidValue;
    *status = found->is_capturing ? 1 : 0;
    return stream == nullptr && is_capturing(machine) ? hvl::kCudaCaptureImplicit : 0;
  });
}

int cuEventCreate(void** event, unsigned flags) {
  return with_gpu("cuEventCreate", [&](Machine& machine, Gpu* gpu) {
    if (flags != hvl::kCudaEventDisableTiming) machine.violate("an event takes the time, which costs some");
    auto* made = new Event;
    made->gpu = gpu;
    machine.events.insert(made);
    *event = made;
    return 0;
  });
}

int cuEventRecord(void* event, void* stream) {
  return with_gpu(
      "cuEventRecord",
      [&](Machine& machine, Gpu* gpu) {
        Stream* given = stream_of(machine, gpu, stream);
        Event* recorded = event_of(machine, event);
        if (given == nullptr || recorded == nullptr) return kInvalidValue;
        Work work;
        recorded->reached = std::make_shared<bool>(false);
        work.run = [given, reached = recorded->reached] {
          *reached = true;
          given->queue.pop_front();
          return true;
        };
        machine.give(given, std::move(work));
        return 0;
      },
      whose(stream));
}

int cuEventQuery(void* event) {
  return with_gpu("cuEventQuery", [&](Machine& machine, Gpu*) {
    Event* found = event_of(machine, event);
    if (found == nullptr) return kInvalidValue;
    return found->reached == nullptr || *found->reached ? 0 : hvl::kCudaNotReady;
  });
}

int cuEventDestroy_v2(void* event) {
  return with_gpu("cuEventDestroy", [&](Machine& machine, Gpu*) {
    Event* found = event_of(machine, event);
    if (found == nullptr) return kInvalidValue;
    machine.events.erase(found);
    delete found;
    return 0;
  });
}

int cuMemHostAlloc(void** memory, size_t num_bytes, unsigned) {
  const std::string numbers = " bytes=" + std::to_string(num_bytes);
  return with_gpu(
      "cuMemHostAlloc",
      [&](Machine& machine, Gpu*) {
        auto* block = static_cast<char*>(std::aligned_alloc(64, (num_bytes + 127) / 64 * 64));
        *reinterpret_cast<size_t*>(block) = num_bytes;
        *memory = block + 64;
        machine.pinned.insert(*memory);
        return 0;
      },
      numbers.c_str());
}

int cuMemFreeHost(void* memory) {
  return with_gpu("cuMemFreeHost", [&](Machine& machine, Gpu*) {
    if (machine.pinned.erase(memory) == 0) machine.violate("memory is freed that is not pinned");
    const auto* begin = static_cast<const char*>(memory);
    const size_t length = *reinterpret_cast<const size_t*>(begin - 64);
    for (const Stream* stream : machine.streams) {
      for (const Work& work : stream->queue) {
        for (const Region& region : work.touched) {
          if (region.begin >= begin && region.begin < begin + length) machine.violate("pinned memory is freed in use");
        }
      }
    }
    std::free(static_cast<char*>(memory) - 64);
    return 0;
  });
}

int cuMemcpyDtoHAsync_v2(void* to, hvl::CudaPointer from, size_t num_bytes, void* stream) {
  return copy("cuMemcpyDtoHAsync", to, at(from), num_bytes, stream, to);
}

int cuMemcpyHtoDAsync_v2(hvl::CudaPointer to, const void* from, size_t num_bytes, void* stream) {
  return copy("cuMemcpyHtoDAsync", at(to), from, num_bytes, stream, from);
}

int cuMemcpyDtoDAsync_v2(hvl::CudaPointer to, hvl::CudaPointer from, size_t num_bytes, void* stream) {
  return copy("cuMemcpyDtoDAsync", at(to), at(from), num_bytes, stream, nullptr);
}

}  // extern "C"

}  // namespace fake_gpu

#pragma GCC visibility pop
