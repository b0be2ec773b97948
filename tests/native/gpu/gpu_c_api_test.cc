// The functions of hvl.h for tensors on GPUs, in a job of one rank.

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "fake_gpu.h"
#include "hvl.h"

namespace {

constexpr int64_t kShape[] = {6};
constexpr double kLong = 60;

class OneRank {
 public:
  OneRank() {
    fake_gpu::reset(2);
    stream = fake_gpu::make_stream(0);
    hvl_config config{};
    config.abi_version = HVL_ABI_VERSION;
    config.size = config.local_size = config.cross_size = 1;
    config.segment_fd = config.wakeup_fd = -1;
    config.processors = 1;
    config.slot_bytes = 4096;
    config.slot_depth = 2;
    config.fusion_threshold = 1 << 20;
    config.cache_capacity = 16;
    config.flight_recorder_size = 16;
    config.gpu_staging_bytes = 4096;
    config.cuda_library = config.nccl_library = FAKE_GPU;
    config.log_level = 3;
    CHECK_EQ(hvl_init(&config), HVL_OK);
  }

  ~OneRank() {
    fake_gpu::release(stream);
    CHECK_EQ(hvl_shutdown(""), HVL_OK);
    CHECK_EQ(fake_gpu::violations(), "");
    CHECK_EQ(fake_gpu::num_contexts(), 0);
    CHECK_EQ(fake_gpu::num_streams(), 0);
  }

  void* stream;
};

using Prepared = std::unique_ptr<hvl_prepared, void (*)(hvl_prepared*)>;

Prepared prepare(const char* name, hvl_kind kind, hvl_device device) {
  const hvl_tensor tensor{kShape, 1, HVL_FLOAT32};
  hvl_request request{};
  request.name = name;
  request.tensors = &tensor;
  request.num_tensors = 1;
  request.kind = kind;
  request.reduce_op = HVL_SUM;
  request.root_rank = -1;
  request.device = device;
  request.prescale = kind == HVL_ALLREDUCE ? 3 : 1;
  request.postscale = 1;
  return Prepared(hvl_prepare(&request), hvl_release);
}

// A tensor that is made once the stream gets on, and lives until then.
struct Later {
  explicit Later(void* made_on) : stream(made_on) {
    fake_gpu::compute(stream, data.data(), 6 * sizeof(float), [this] { data.assign(6, 2.0F); });
  }
  ~Later() {
    fake_gpu::release(stream);
    fake_gpu::synchronize(stream);
  }
  Later(const Later&) = delete;

  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data.data()); }

  void* stream;
  std::vector<float> data = std::vector<float>(6);
};

TEST(waits_on_the_host_and_on_streams) {
  OneRank job;
  const Prepared allreduce = prepare("x", HVL_ALLREDUCE, HVL_CUDA);
  fake_gpu::hold(job.stream);
  Later later(job.stream);
  const uintptr_t address = later.address();
  const int64_t handle = hvl_enqueue_on_stream(allreduce.get(), &address, &address, nullptr, 0, job.stream);
  REQUIRE(handle > 0);
  CHECK_EQ(hvl_wait(handle, 0.05, nullptr, nullptr), HVL_IN_PROGRESS);
  while (hvl_poll(handle) == 0) std::this_thread::yield();  // until its work is queued on the device
  CHECK_EQ(hvl_poll(handle), 1);
  CHECK_EQ(hvl_try_wait(handle), HVL_IN_PROGRESS);
  int64_t handles[] = {handle, 0};
  CHECK_EQ(hvl_wait_all(handles, 2, 0.0), HVL_IN_PROGRESS);
  CHECK_EQ(hvl_wait_on_stream(handle, kLong, nullptr, nullptr, job.stream), HVL_OK);
  CHECK_EQ(hvl_try_wait(handle), HVL_UNKNOWN_HANDLE);
  fake_gpu::compute(job.stream, later.data.data(), sizeof(float), [&] { later.data[0] += 1; });
  fake_gpu::release(job.stream);
  fake_gpu::synchronize(job.stream);
  CHECK_EQ(later.data[0], 7.0F);
  CHECK_EQ(later.data[5], 6.0F);
}

TEST(many_at_once) {
  OneRank job;
  const Prepared first = prepare("x", HVL_ALLREDUCE, HVL_CUDA);
  const Prepared second = prepare("y", HVL_ALLREDUCE, HVL_CUDA);
  hvl_prepared* both[] = {first.get(), second.get()};
  for (const bool on_stream : {true, false}) {
    fake_gpu::hold(job.stream);
    Later later[] = {Later(job.stream), Later(job.stream)};
    const uintptr_t addresses[] = {later[0].address(), later[1].address()};
    int64_t handles[2];
    const size_t num_events = fake_gpu::count(0, "cuEventRecord test");
    CHECK_EQ(hvl_enqueue_all_on_stream(both, addresses, 2, handles, 0, job.stream), HVL_OK);
    CHECK_EQ(fake_gpu::count(0, "cuEventRecord test"), num_events + 1);
    if (on_stream) {
      CHECK_EQ(hvl_wait_all_on_stream(handles, 2, kLong, job.stream), HVL_OK);
      fake_gpu::release(job.stream);
      fake_gpu::synchronize(job.stream);
    } else {
      fake_gpu::release(job.stream);
      CHECK_EQ(hvl_wait_all(handles, 2, kLong), HVL_OK);
    }
    CHECK_EQ(handles[0] + handles[1], 0);
    CHECK_EQ(later[0].data[5], 6.0F);
    CHECK_EQ(later[1].data[5], 6.0F);
  }
}

TEST(outputs_that_the_caller_allocates) {
  OneRank job;
  const Prepared allgather = prepare("x", HVL_ALLGATHER, HVL_CUDA);
  std::vector<float> data(6, 5.0F);
  const auto address = reinterpret_cast<uintptr_t>(data.data());
  hvl_callbacks callbacks{};
  callbacks.allocate = hvl_place_output;  // it has memory of the host, too
  const hvl_callbacks* const without_memory[] = {nullptr, &callbacks};
  for (const hvl_callbacks* none : without_memory) {
    CHECK_EQ(hvl_enqueue_on_stream(allgather.get(), &address, nullptr, none, 0, job.stream), -HVL_INVALID_ARGUMENT);
    CHECK_HAS(std::string(hvl_last_error()), "needs a function of its own that allocates its outputs");
  }
  std::vector<float> output(6);
  callbacks.context = output.data();
  callbacks.allocate = [](void* context, int32_t, const hvl_output* described) {
    CHECK_EQ(described->num_bytes, 24);
    return context;
  };
  const int64_t handle = hvl_enqueue_on_stream(allgather.get(), &address, nullptr, &callbacks, 0, job.stream);
  REQUIRE(handle > 0);
  hvl_output* outputs = nullptr;
  int32_t num_outputs = -1;
  CHECK_EQ(hvl_wait(handle, kLong, &outputs, &num_outputs), HVL_OK);
  CHECK_EQ(num_outputs, 0);
  CHECK_EQ(output[5], 5.0F);
}

TEST(tensors_and_streams_that_do_not_go_together) {
  OneRank job;
  const Prepared on_gpu = prepare("x", HVL_ALLREDUCE, HVL_CUDA);
  const Prepared on_cpu = prepare("y", HVL_ALLREDUCE, HVL_CPU);
  std::vector<float> data(6);
  const auto address = reinterpret_cast<uintptr_t>(data.data());
  CHECK_EQ(hvl_enqueue_inplace(on_gpu.get(), address), -HVL_INVALID_ARGUMENT);
  CHECK_EQ(std::string(hvl_last_error()), "'x' is on a GPU: it needs a stream");
  CHECK_EQ(hvl_enqueue_on_stream(on_cpu.get(), &address, &address, nullptr, 0, job.stream), -HVL_INVALID_ARGUMENT);
  CHECK_EQ(std::string(hvl_last_error()), "'y' is on the CPU, which has no stream");
  fake_gpu::capture(job.stream, true);
  CHECK_EQ(hvl_enqueue_on_stream(on_gpu.get(), &address, &address, nullptr, 0, job.stream), -HVL_INVALID_ARGUMENT);
  CHECK_HAS(std::string(hvl_last_error()), "CUDA graph");
  fake_gpu::capture(job.stream, false);
  hvl_prepared* both[] = {on_gpu.get(), on_cpu.get()};
  const uintptr_t addresses[] = {address, address};
  int64_t handles[2];
  CHECK_EQ(hvl_enqueue_all_on_stream(both, addresses, 2, handles, 0, job.stream), HVL_INVALID_ARGUMENT);
  CHECK(handles[0] > 0 && handles[1] == 0);
  CHECK_EQ(hvl_wait_all(handles, 2, kLong), HVL_OK);
}

TEST(a_stream_that_is_captured_waits_for_nothing) {
  OneRank job;
  const Prepared allreduce = prepare("x", HVL_ALLREDUCE, HVL_CUDA);
  Later later(job.stream);
  const uintptr_t address = later.address();
  int64_t handle = hvl_enqueue_on_stream(allreduce.get(), &address, &address, nullptr, 0, job.stream);
  fake_gpu::synchronize(job.stream);
  fake_gpu::capture(job.stream, true);
  CHECK_EQ(hvl_wait_on_stream(handle, kLong, nullptr, nullptr, job.stream), HVL_INVALID_ARGUMENT);
  CHECK_EQ(hvl_wait_all_on_stream(&handle, 1, kLong, job.stream), HVL_INVALID_ARGUMENT);
  CHECK_HAS(std::string(hvl_last_error()), "CUDA graph");
  fake_gpu::capture(job.stream, false);
  CHECK_EQ(hvl_wait(handle, kLong, nullptr, nullptr), HVL_OK);
  CHECK_EQ(later.data[5], 6.0F);
}

// So the host waits: a caller that receives the error may free the memory.
TEST(a_stream_that_cannot_wait) {
  OneRank job;
  const Prepared allreduce = prepare("x", HVL_ALLREDUCE, HVL_CUDA);
  for (const bool many : {false, true}) {
    fake_gpu::hold(job.stream);
    Later later(job.stream);
    const uintptr_t address = later.address();
    int64_t handle = hvl_enqueue_on_stream(allreduce.get(), &address, &address, nullptr, 0, job.stream);
    const auto wait = [&](double timeout) {
      return many ? hvl_wait_all_on_stream(&handle, 1, timeout, job.stream)
                  : hvl_wait_on_stream(handle, timeout, nullptr, nullptr, job.stream);
    };
    while (hvl_poll(handle) == 0) std::this_thread::yield();
    fake_gpu::fail(0, "cuStreamWaitEvent", 1);
    CHECK_EQ(wait(0.05), HVL_IN_PROGRESS);
    CHECK_EQ(hvl_poll(handle), 1);
    fake_gpu::release(job.stream);
    CHECK_EQ(wait(kLong), HVL_RESOURCES);
    CHECK_EQ(later.data[5], 6.0F);
    CHECK_EQ(hvl_try_wait(handle), HVL_UNKNOWN_HANDLE);
    fake_gpu::fail(0, "cuStreamWaitEvent", 0);
  }
}

// Once the job is broken all callers get that error, whatever else fails on the device.
TEST(a_device_that_fails_when_the_job_is_broken) {
  OneRank job;
  const Prepared allreduce = prepare("x", HVL_ALLREDUCE, HVL_CUDA);
  Later later(job.stream);
  const uintptr_t address = later.address();
  fake_gpu::fail(0, "ncclAllReduce", 1);
  const int64_t handle = hvl_enqueue_on_stream(allreduce.get(), &address, &address, nullptr, 0, job.stream);
  CHECK_EQ(hvl_wait(handle, kLong, nullptr, nullptr), HVL_JOB_BROKEN);
  fake_gpu::fail(0, "cuEventRecord", 700);
  CHECK_EQ(hvl_enqueue_on_stream(allreduce.get(), &address, &address, nullptr, 0, job.stream), -HVL_JOB_BROKEN);
  fake_gpu::fail(0, "cuEventRecord", 0);
}

// No engine watches the device any more, so nothing else detects it.
TEST(a_device_that_fails_after_the_job_has_ended) {
  OneRank job;
  const Prepared allreduce = prepare("x", HVL_ALLREDUCE, HVL_CUDA);
  Later later(job.stream);
  const uintptr_t address = later.address();
  const int64_t handle = hvl_enqueue_on_stream(allreduce.get(), &address, &address, nullptr, 0, job.stream);
  while (hvl_poll(handle) == 0) std::this_thread::yield();
  CHECK_EQ(hvl_shutdown(""), HVL_OK);
  fake_gpu::fail(0, "cuEventQuery", 700);
  CHECK_EQ(hvl_try_wait(handle), HVL_JOB_BROKEN);
  CHECK_HAS(std::string(hvl_last_error()), "illegal memory access");
}

}  // namespace
