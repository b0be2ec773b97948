// A device of the type "GPU" for TensorFlow on machines that have none, made of the test double of the CUDA driver
// (tests/native/fake_gpu): its memory is the host's, and its streams are the double's. TensorFlow takes it for a
// pluggable device. To be preloaded, see below.

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "fake_gpu.h"
#include "tensorflow/c/experimental/stream_executor/stream_executor.h"
#include "tensorflow/c/experimental/stream_executor/stream_executor_internal.h"

extern "C" {
// Those of libcuda.so.1 that this needs, which the double has.
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuCtxPushCurrent_v2(void* context);
int cuCtxPopCurrent_v2(void** context);
int cuEventCreate(void** event, unsigned flags);
int cuEventRecord(void* event, void* stream);
int cuEventQuery(void* event);
int cuEventDestroy_v2(void* event);
int cuStreamWaitEvent(void* stream, void* event, unsigned flags);
}

namespace {

constexpr int kNumGpus = 2;
constexpr int64_t kMemory = int64_t{2} << 30;
constexpr unsigned kNoTiming = 2;
std::atomic<bool> has_handles{true};
std::mutex mutex;
std::vector<void*> streams[kNumGpus];  // the first one is that of the kernels

// As long as this lives the calling thread has the context of a GPU.
class Current {
 public:
  explicit Current(const SP_Device* device) {
    static void* contexts[kNumGpus];
    static std::once_flag once;
    std::call_once(once, [] {
      for (int gpu = 0; gpu < kNumGpus; ++gpu) cuDevicePrimaryCtxRetain(&contexts[gpu], gpu);
    });
    cuCtxPushCurrent_v2(contexts[device->ordinal]);
  }
  ~Current() {
    void* ignored;
    cuCtxPopCurrent_v2(&ignored);
  }
};

struct Event {
  void* event;
  void* stream = nullptr;  // where it was recorded last
};

Event* event_of(SP_Event event) { return reinterpret_cast<Event*>(event); }

void give(void* stream, void* memory, uint64_t num_bytes, std::function<void()> work) {
  fake_gpu::compute(stream, memory, num_bytes, std::move(work));
}

void allocate(const SP_Device*, uint64_t size, int64_t, SP_DeviceMemoryBase* memory) {
  memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
  memory->opaque = std::aligned_alloc(256, (size + 255) / 256 * 256);
  memory->size = size;
}

void deallocate(const SP_Device*, SP_DeviceMemoryBase* memory) {
  std::free(memory->opaque);
  memory->opaque = nullptr;
}

void* host_allocate(const SP_Device*, uint64_t size) { return std::aligned_alloc(64, (size + 63) / 64 * 64); }
void host_deallocate(const SP_Device*, void* memory) { std::free(memory); }
TF_Bool get_allocator_stats(const SP_Device*, SP_AllocatorStats*) { return 0; }

TF_Bool memory_usage(const SP_Device*, int64_t* free, int64_t* total) {
  *free = *total = kMemory;
  return 1;
}

void create_stream(const SP_Device* device, SP_Stream* stream, TF_Status*) {
  void* made = fake_gpu::make_stream(device->ordinal);
  const std::lock_guard<std::mutex> lock(mutex);
  streams[device->ordinal].push_back(made);
  *stream = reinterpret_cast<SP_Stream>(made);
}

void destroy_stream(const SP_Device*, SP_Stream) {}  // the double has no such function; they are TensorFlow's few

void create_event(const SP_Device* device, SP_Event* event, TF_Status*) {
  const Current current(device);
  auto* made = new Event;
  cuEventCreate(&made->event, kNoTiming);
  *event = reinterpret_cast<SP_Event>(made);
}

void destroy_event(const SP_Device* device, SP_Event event) {
  const Current current(device);
  cuEventDestroy_v2(event_of(event)->event);
  delete event_of(event);
}

SE_EventStatus get_event_status(const SP_Device* device, SP_Event event) {
  const Current current(device);
  return cuEventQuery(event_of(event)->event) == 0 ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
}

void record_event(const SP_Device* device, SP_Stream stream, SP_Event event, TF_Status*) {
  const Current current(device);
  event_of(event)->stream = stream;
  cuEventRecord(event_of(event)->event, stream);
}

void wait_for_event(const SP_Device* const device, SP_Stream stream, SP_Event event, TF_Status* const) {
  const Current current(device);
  cuStreamWaitEvent(stream, event_of(event)->event, 0);
}

void create_stream_dependency(const SP_Device* device, SP_Stream dependent, SP_Stream other, TF_Status* status) {
  SP_Event event;
  create_event(device, &event, status);
  record_event(device, other, event, status);
  wait_for_event(device, dependent, event, status);
  destroy_event(device, event);
}

void get_stream_status(const SP_Device*, SP_Stream, TF_Status*) {}

void block_for_event(const SP_Device*, SP_Event event, TF_Status*) {
  if (event_of(event)->stream != nullptr) fake_gpu::synchronize(event_of(event)->stream);
}

void block_for_stream(const SP_Device*, SP_Stream stream, TF_Status*) { fake_gpu::synchronize(stream); }

void block_for_all(const SP_Device* device, TF_Status*) {
  std::vector<void*> all;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    all = streams[device->ordinal];
  }
  for (void* stream : all) fake_gpu::synchronize(stream);
}

void copy_to_host(const SP_Device*, SP_Stream stream, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
                  TF_Status*) {
  give(stream, from->opaque, size, [to, data = from->opaque, size] { memcpy(to, data, size); });
}

void copy_from_host(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
                    TF_Status*) {
  give(stream, to->opaque, size, [data = to->opaque, from, size] { memcpy(data, from, size); });
}

void copy_on_device(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                    uint64_t size, TF_Status*) {
  give(stream, to->opaque, size, [data = to->opaque, other = from->opaque, size] { memcpy(data, other, size); });
}

void copy_to_host_now(const SP_Device* device, void* to, const SP_DeviceMemoryBase* from, uint64_t size,
                      TF_Status* status) {
  block_for_all(device, status);
  memcpy(to, from->opaque, size);
}

void copy_from_host_now(const SP_Device* device, SP_DeviceMemoryBase* to, const void* from, uint64_t size,
                        TF_Status* status) {
  block_for_all(device, status);
  memcpy(to->opaque, from, size);
}

void copy_on_device_now(const SP_Device* device, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                        uint64_t size, TF_Status* status) {
  block_for_all(device, status);
  memcpy(to->opaque, from->opaque, size);
}

void fill(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* memory, uint8_t value, uint64_t size, TF_Status*) {
  give(stream, memory->opaque, size, [data = memory->opaque, value, size] { memset(data, value, size); });
}

void fill_with_zeros(const SP_Device* device, SP_Stream stream, SP_DeviceMemoryBase* memory, uint64_t size,
                     TF_Status* status) {
  fill(device, stream, memory, 0, size, status);
}

void fill_words(const SP_Device*, SP_Stream stream, SP_DeviceMemoryBase* memory, uint32_t value, uint64_t size,
                TF_Status*) {
  give(stream, memory->opaque, size, [data = memory->opaque, value, size] {
    for (uint64_t at = 0; at + sizeof value <= size; at += sizeof value) {
      memcpy(static_cast<char*>(data) + at, &value, sizeof value);
    }
  });
}

TF_Bool host_callback(const SP_Device*, SP_Stream, SE_StatusCallbackFn, void*) { return 0; }  // not needed

void create_timer(const SP_Device*, SP_Timer* timer, TF_Status*) { *timer = nullptr; }
void destroy_timer(const SP_Device*, SP_Timer) {}
void use_timer(const SP_Device*, SP_Stream, SP_Timer, TF_Status*) {}
uint64_t nanoseconds(SP_Timer) { return 0; }

void create_stream_executor(const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status*) {
  SP_StreamExecutor* made = params->stream_executor;
  made->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  made->allocate = allocate;
  made->deallocate = deallocate;
  made->host_memory_allocate = host_allocate;
  made->host_memory_deallocate = host_deallocate;
  made->get_allocator_stats = get_allocator_stats;
  made->device_memory_usage = memory_usage;
  made->create_stream = create_stream;
  made->destroy_stream = destroy_stream;
  made->create_stream_dependency = create_stream_dependency;
  made->get_stream_status = get_stream_status;
  made->create_event = create_event;
  made->destroy_event = destroy_event;
  made->get_event_status = get_event_status;
  made->record_event = record_event;
  made->wait_for_event = wait_for_event;
  made->create_timer = create_timer;
  made->destroy_timer = destroy_timer;
  made->start_timer = use_timer;
  made->stop_timer = use_timer;
  made->memcpy_dtoh = copy_to_host;
  made->memcpy_htod = copy_from_host;
  made->memcpy_dtod = copy_on_device;
  made->sync_memcpy_dtoh = copy_to_host_now;
  made->sync_memcpy_htod = copy_from_host_now;
  made->sync_memcpy_dtod = copy_on_device_now;
  made->block_host_for_event = block_for_event;
  made->block_host_until_done = block_for_stream;
  made->synchronize_all_activity = block_for_all;
  made->mem_zero = fill_with_zeros;
  made->memset = fill;
  made->memset32 = fill_words;
  made->host_callback = host_callback;
}

void create_device(const SP_Platform*, SE_CreateDeviceParams* params, TF_Status*) {
  params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
  params->device->ordinal = params->ordinal;
  params->device->hardware_name = "double";
}

void nothing(const SP_Platform*, SP_Device*) {}
void nothing(const SP_Platform*, SP_DeviceFns*) {}
void nothing(const SP_Platform*, SP_StreamExecutor*) {}
void nothing(const SP_Platform*, SP_TimerFns*) {}
void nothing(SP_Platform*) {}
void nothing(SP_PlatformFns*) {}

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status*) {
  fake_gpu::reset(kNumGpus);
  SP_Platform* platform = params->platform;
  platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  platform->name = "DOUBLE";
  platform->type = "GPU";
  platform->use_bfc_allocator = 1;  // as CUDA's devices do
  platform->force_memory_growth = 1;
  SP_PlatformFns* functions = params->platform_fns;
  functions->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  functions->get_device_count = [](const SP_Platform*, int* count, TF_Status*) { *count = kNumGpus; };
  functions->create_device = create_device;
  functions->destroy_device = nothing;
  functions->create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status*) {
    params->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
  };
  functions->destroy_device_fns = nothing;
  functions->create_stream_executor = create_stream_executor;
  functions->destroy_stream_executor = nothing;
  functions->create_timer_fns = [](const SP_Platform*, SP_TimerFns* timer, TF_Status*) {
    timer->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
    timer->nanoseconds = nanoseconds;
  };
  functions->destroy_timer_fns = nothing;
  params->destroy_platform = nothing;
  params->destroy_platform_fns = nothing;
}

// For the tests.

void hold_kernels(int gpu) { fake_gpu::hold(streams[gpu].front()); }
void release_kernels(int gpu) { fake_gpu::release(streams[gpu].front()); }
void fail_nccl(int gpu) {
  constexpr int kRemoteError = 6;
  fake_gpu::set_async_error(gpu, kRemoteError);
}
// As streams are that are not CUDA's.
void set_has_handles(bool has) { has_handles = has; }
size_t count_calls(int gpu, const char* beginning) { return fake_gpu::count(gpu, beginning); }

const char* violations() {
  static std::string text;
  text = fake_gpu::violations();
  return text.c_str();
}

}  // extern "C"

// The one thing that streams of a pluggable device do not do is to say what they are, as those of CUDA do. This takes
// the place of TensorFlow's StreamCommon::platform_specific_handle(), because the library is preloaded.
using Handle = stream_executor::Stream::PlatformSpecificHandle;
extern "C" Handle handle_of(const stream_executor::StreamCommon* stream) asm(
    "_ZNK15stream_executor12StreamCommon24platform_specific_handleEv");
extern "C" Handle handle_of(const stream_executor::StreamCommon* stream) {
  if (!has_handles) return {nullptr};
  return {const_cast<stream_executor::CStream*>(static_cast<const stream_executor::CStream*>(stream))->Handle()};
}

#pragma GCC visibility pop
