// Failures of GPUs and NCCL: all callers get an error, no device hangs, and the process can start again.

#include <unistd.h>

#include <cstdio>

#include "check.h"
#include "gpu_job.h"

namespace hvl {
namespace {

constexpr int kIllegalAddress = 700;
constexpr size_t kCount = 100;

std::shared_ptr<Operation> allreduce(const std::string& name = "x") {
  return on_gpu(make(name, HVL_ALLREDUCE, {{kCount}}));
}

void check_sum(GpuJob& job) {
  job.job().on_all([&](int rank) {
    std::vector<float> data(kCount, 1.0F);
    CHECK_EQ(job.run(rank, allreduce(), data.data()).message(), "");
    CHECK_EQ(data[kCount - 1], static_cast<float>(job.job().size()));
  });
}

// Ranks fail with a text that has all of these.
void check_broken(GpuJob& job, const std::vector<std::string>& parts) {
  job.job().on_all([&](int rank) {
    std::vector<float> data(kCount, 1.0F);
    Status status = job.run(rank, allreduce(), data.data());
    // The collective at which the device failed was complete; the next one gets the error.
    const uint64_t deadline = now_ns() + kPatience;
    while (status.ok() && now_ns() < deadline) status = job.job().engine(rank).job_status();
    CHECK_EQ(status.code(), HVL_JOB_BROKEN);
    for (const std::string& part : parts) CHECK_HAS(status.message(), part);
  });
}

TEST(functions_that_fail_break_the_job_and_say_why) {
  struct Case {
    const char* function;
    int result;
    std::vector<std::string> parts;
  };
  const std::vector<Case> cases = {
      {"ncclAllReduce", kNcclUnhandledCudaError, {"rank 1, GPU 1", "NCCL has refused", "unhandled cuda error"}},
      {"ncclGroupEnd", kNcclInternalError, {"rank 1, GPU 1", "NCCL has refused"}},
      {"ncclCommInitRankConfig", kNcclSystemError, {"rank 1, GPU 1", "cannot make a communicator"}},
      {"ncclCommGetAsyncError", kNcclInternalError, {"rank 1, GPU 1", "how it gets on"}},
      {"cuStreamCreateWithPriority", 2, {"rank 1, GPU 1", "a stream cannot be made"}},
      {"cuEventQuery", kIllegalAddress, {"rank 1, GPU 1", "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal memory access"}}};
  for (const Case& each : cases) {
    GpuJob job(3, on_double(), [&] { fake_gpu::fail(1, each.function, each.result); });
    check_broken(job, each.parts);
    fake_gpu::fail(1, each.function, 0);
  }
}

TEST(functions_that_fail_while_staging_break_the_job) {
  for (const char* function : {"cuMemHostAlloc", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"}) {
    GpuJob job(2, on_double(GpuOperations::kStaging), [&] { fake_gpu::fail(1, function, 2); });
    check_broken(job, {"rank 1, GPU 1"});
    fake_gpu::fail(1, function, 0);
  }
}

TEST(an_asynchronous_error_breaks_the_job) {
  GpuJob job(3, on_double(), [] { fake_gpu::set_polls(5); });
  check_sum(job);
  fake_gpu::set_async_error(2, kNcclRemoteError);
  check_broken(job, {"rank 2, GPU 2", "a collective of NCCL has failed", "remote process exited"});
  job.job().shut_down();
  for (int gpu : {0, 1, 2}) CHECK_EQ(fake_gpu::count(gpu, "ncclCommAbort"), 1);
}

// The work of GPU 1's communicators is dropped, so none of their collectives can end.
void wait_for_aborts_on_gpu_1(size_t count) {
  const uint64_t deadline = now_ns() + kPatience / 4;
  while (fake_gpu::count(1, "ncclCommAbort") < count && now_ns() < deadline) std::this_thread::yield();
}

// It was complete, but its device waits for a rank that never comes.
TEST(what_a_broken_job_leaves_on_the_device_is_aborted_and_fails) {
  for (int round = 0; round < 2; ++round) {  // the process can begin anew
    GpuJob job(3);
    std::vector<std::vector<float>> data(3, std::vector<float>(kCount, 1.0F));
    check_sum(job);
    fake_gpu::hold(job.stream(1));  // what follows waits for it, on all GPUs
    job.job().on_all([&](int rank) {
      char* memory = reinterpret_cast<char*>(data[static_cast<size_t>(rank)].data());
      const int64_t handle = job.enqueue(rank, allreduce(), {memory}, {memory});
      job.job().wait_only(rank, handle);
      if (rank == 0) job.job().engine(0).memory()->break_job("rank 4711 is lost");
      if (rank == 1) {  // its own program gets on, or stands still for ever
        wait_for_aborts_on_gpu_1(1);
        fake_gpu::release(job.stream(1));
      }
      const Status status = job.wait(rank, handle);
      CHECK_EQ(status.code(), HVL_JOB_BROKEN);
      CHECK_HAS(status.message(), "rank 4711 is lost");
      Status refused;
      job.job().enqueue(rank, allreduce("y"), {memory}, {memory}, &refused);
      CHECK_EQ(refused.code(), HVL_JOB_BROKEN);
    });
    job.job().shut_down();
    for (int gpu : {0, 1, 2}) CHECK_EQ(fake_gpu::count(gpu, "ncclCommAbort"), 1);
  }
}

// To free one of them waits for what the others do on the device. Which one that is changes, as their order is not
// known.
TEST(communicators_are_aborted_at_once) {
  for (int32_t stuck : {0, 1}) {
    GpuJob job(3);
    std::vector<std::vector<float>> data(3, std::vector<float>(kCount, 1.0F));
    const auto reduce = [](int32_t process_set) {
      auto operation = allreduce("of " + std::to_string(process_set));
      operation->signature.process_set = process_set;
      return operation;
    };
    job.job().on_all([&](int rank) {
      auto addition = make("add", HVL_ADD_PROCESS_SET, {});
      addition->signature.arguments = {0, 1};
      CHECK_EQ(job.wait(rank, job.enqueue(rank, addition, {}, {})).message(), "");
      float* mine = data[static_cast<size_t>(rank)].data();
      CHECK_EQ(job.run(rank, reduce(0), mine).message(), "");
      if (rank != 2) CHECK_EQ(job.run(rank, reduce(1), mine).message(), "");
    });
    fake_gpu::hold(job.stream(1));
    job.job().on_all([&](int rank) {
      int64_t handle = 0;
      if (rank <= 2 - stuck) {
        char* memory = reinterpret_cast<char*>(data[static_cast<size_t>(rank)].data());
        handle = job.enqueue(rank, reduce(stuck), {memory}, {memory});
        job.job().wait_only(rank, handle);
      }
      if (rank == 0) job.job().engine(0).memory()->break_job("rank 4711 is lost");
      if (rank == 1) {
        wait_for_aborts_on_gpu_1(2);
        fake_gpu::release(job.stream(1));
      }
      if (handle != 0) CHECK_HAS(job.wait(rank, handle).message(), "rank 4711 is lost");
      while (job.job().engine(rank).job_status().ok()) std::this_thread::yield();
    });
    job.job().shut_down();
    for (int gpu : {0, 1, 2}) CHECK_EQ(fake_gpu::count(gpu, "ncclCommAbort"), gpu == 2 ? 1 : 2);
  }
}

TEST(a_tensor_on_the_cpu_of_one_rank_and_on_the_gpu_of_another) {
  GpuJob job(3);
  job.job().on_all([&](int rank) {
    std::vector<float> data(kCount, 1.0F);
    for (int round = 0; round < 2; ++round) {  // it says the same again
      const auto operation = rank == 1 ? make("x", HVL_ALLREDUCE, {{kCount}}) : allreduce();
      const Status status = job.run(rank, operation, data.data());
      CHECK_EQ(status.code(), HVL_MISMATCH);
      for (const char* part : {"'x'", "rank 1", "GPU", "CPU"}) CHECK_HAS(status.message(), part);
    }
    CHECK_EQ(job.run(rank, make("x", HVL_ALLREDUCE, {{kCount}}), data.data()).message(), "");
  });
  check_sum(job);
}

TEST(tensors_of_cpu_and_gpu_in_one_job) {
  GpuJob job(3);
  job.job().on_all([&](int rank) {
    for (int round = 0; round < 10; ++round) {
      std::vector<float> cpu(kCount, 1.0F);
      std::vector<float> gpu(kCount, 2.0F);
      char* memory[] = {reinterpret_cast<char*>(cpu.data()), reinterpret_cast<char*>(gpu.data())};
      const int64_t first = job.enqueue(rank, make("cpu", HVL_ALLREDUCE, {{kCount}}), {memory[0]}, {memory[0]});
      const int64_t second = job.enqueue(rank, allreduce("gpu"), {memory[1]}, {memory[1]});
      CHECK_EQ(job.wait(rank, second).message(), "");
      CHECK_EQ(job.wait(rank, first).message(), "");
      CHECK_EQ(cpu[0], 3.0F);
      CHECK_EQ(gpu[0], 6.0F);
    }
  });
}

TEST(what_cannot_be_enqueued) {
  GpuJob job(1);
  std::shared_ptr<const GpuRequest> request;
  Engine& engine = job.job().engine(0);
  CHECK_EQ(engine.request_gpu(5, nullptr, &request).message(), "there is no GPU 5: this process sees 1 of them");
  fake_gpu::capture(job.stream(0), true);
  const Status captured = engine.request_gpu(0, job.stream(0), &request);
  CHECK_EQ(captured.code(), HVL_INVALID_ARGUMENT);
  CHECK_HAS(captured.message(), "captured into a CUDA graph");
  // Work of the default stream would become part of the graph, too.
  CHECK_EQ(engine.request_gpu(0, nullptr, &request).message(), captured.message());
  fake_gpu::capture(job.stream(0), false);
  CHECK_EQ(engine.request_gpu(0, nullptr, &request).message(), "");
  const Status per_thread = engine.request_gpu(0, kCudaStreamPerThread, &request);
  CHECK_EQ(per_thread.code(), HVL_INVALID_ARGUMENT);
  CHECK_HAS(per_thread.message(), "cudaStreamPerThread");
  request = nullptr;
  const Status other = engine.request_gpu(1, job.stream(0), &request);
  CHECK_EQ(other.code(), HVL_INVALID_ARGUMENT);
  CHECK_HAS(other.message(), "on GPU 1, but this rank has used GPU 0");
  check_sum(job);
}

TEST(libraries_that_are_missing) {
  EngineOptions options = on_double();
  options.gpu.cuda_library = "/nowhere/libcuda.so.1";
  GpuJob job(1, options);
  std::shared_ptr<const GpuRequest> request;
  const Status status = job.job().engine(0).request_gpu(0, nullptr, &request);
  CHECK_EQ(status.code(), HVL_RESOURCES);
  CHECK_HAS(status.message(), "/nowhere/libcuda.so.1 cannot be opened");
}

TEST(without_nccl_the_memory_of_the_host_is_used_unless_that_is_forbidden) {
  EngineOptions options = on_double();
  options.gpu.nccl_library = "/nowhere/libnccl.so.2";
  {
    GpuJob job(2, options);
    check_sum(job);
    CHECK_EQ(fake_gpu::count(0, "nccl"), 0);
  }
  options.gpu.operations = GpuOperations::kNccl;
  GpuJob job(2, options);
  check_broken(job, {"HOROVODLIKE_GPU_OPERATIONS=nccl cannot be followed", "/nowhere/libnccl.so.2 cannot be opened"});
}

// Returns the text written to standard error while `run` runs.
std::string errors_of(const std::function<void()>& run) {
  FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  std::fflush(stderr);
  const int before = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  run();
  std::fflush(stderr);
  dup2(before, STDERR_FILENO);
  close(before);
  std::rewind(file);
  std::string text;
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) text += static_cast<char>(c);
  std::fclose(file);
  std::fputs(text.c_str(), stderr);  // also what has failed
  return text;
}

std::shared_ptr<Operation> of_integers(const std::string& name, Kind kind) {
  auto operation = allreduce(name);
  operation->signature.kind = kind;
  operation->signature.tensors[0] = {HVL_INT16, {2 * kCount}};  // as many bytes
  return operation;
}

TEST(what_nccl_cannot_do_is_warned_of_once) {
  const auto run = [](GpuJob& job, int rank) {
    std::vector<float> data(kCount);
    std::vector<float> more(kCount);
    char* memory[] = {reinterpret_cast<char*>(data.data()), reinterpret_cast<char*>(more.data())};
    // NCCL does the first one of the batch.
    auto mixed = on_gpu(make("mixed", HVL_ALLREDUCE, {{kCount}, {kCount}}));
    mixed->signature.tensors[1] = {HVL_INT16, {2 * kCount}};
    CHECK_EQ(job.run(rank, allreduce("fine"), data.data()).message(), "");
    CHECK_EQ(job.wait(rank, job.enqueue(rank, mixed, {memory[0], memory[1]}, {memory[0], memory[1]})).message(), "");
    CHECK_EQ(job.run(rank, of_integers("again", HVL_ALLREDUCE), data.data()).message(), "");
    CHECK_EQ(job.run(rank, of_integers("scattered", HVL_REDUCESCATTER), data.data()).message(), "");
    auto scaled = on_gpu(make("scaled", HVL_REDUCESCATTER, {{kCount}}, HVL_MAX));
    scaled->signature.prescale = 2;
    CHECK_EQ(job.run(rank, scaled, data.data()).message(), "");
    for (const char* name : {"adapted", "adapted again"}) {
      CHECK_EQ(job.run(rank, on_gpu(make(name, HVL_ALLREDUCE, {{kCount}}, HVL_ADASUM)), data.data()).message(), "");
    }
    if (rank != 2) CHECK_EQ(job.run(rank, allreduce("alone"), data.data()).message(), "");
    CHECK_EQ(job.wait(rank, job.enqueue(rank, make("join", HVL_JOIN, {}), {}, {})).message(), "");
  };
  for (const GpuOperations operations : {GpuOperations::kAuto, GpuOperations::kNccl}) {
    const std::string errors = errors_of([&] {
      GpuJob job(3, on_double(operations));
      job.job().on_all([&](int rank) { run(job, rank); });
    });
    CHECK_EQ(check::count_of(errors, "through the memory of the host"), 4);
    for (const char* text :
         {"'mixed' and its like go through the memory of the host: NCCL has no 16-bit integers\n",
          "'scaled' and its like go through the memory of the host: NCCL scales sums only\n",
          "'adapted' and its like go through the memory of the host: NCCL has no Adasum\n",
          "'alone' and its like go through the memory of the host: some ranks of its process set have joined\n"}) {
      CHECK_EQ(check::count_of(errors, text), 1);
    }
  }
  const std::string told_to = errors_of([&] {
    GpuJob job(3, on_double(GpuOperations::kStaging));
    job.job().on_all([&](int rank) { run(job, rank); });
  });
  CHECK_EQ(told_to, "");
}

TEST(an_nccl_that_makes_no_id) {
  const auto prepare = [] { fake_gpu::fail(0, "ncclGetUniqueId", kNcclSystemError); };
  {
    GpuJob job(3, on_double(), prepare);
    check_sum(job);
    check_sum(job);
    for (int gpu : {0, 1, 2}) CHECK_EQ(fake_gpu::count(gpu, "ncclComm"), 0);
    CHECK_EQ(fake_gpu::count(0, "ncclGetUniqueId"), 1);
  }
  GpuJob job(3, on_double(GpuOperations::kNccl), prepare);
  check_broken(job,
               {"HOROVODLIKE_GPU_OPERATIONS=nccl cannot be followed: rank 0 cannot use NCCL", "as the test wants"});
}

TEST(an_nccl_that_is_too_old) {
  GpuJob job(2, on_double(GpuOperations::kNccl), [] { fake_gpu::set_nccl_version(21304); });
  check_broken(job, {"21304", "NCCL 2.14 (21400) or newer is needed"});
}

TEST(a_device_that_is_busy_when_the_job_ends_gets_time) {
  std::vector<std::vector<float>> data(2, std::vector<float>(kCount, 1.0F));
  GpuJob job(2);
  fake_gpu::hold(job.stream(0));
  job.job().on_all([&](int rank) {
    char* memory = reinterpret_cast<char*>(data[static_cast<size_t>(rank)].data());
    const int64_t handle = job.enqueue(rank, allreduce(), {memory}, {memory});
    job.job().wait_only(rank, handle);
    std::vector<hvl_output> outputs;
    job.job().handles(rank).consume(handle, &outputs);
    if (rank == 0) fake_gpu::release(job.stream(0));
    job.job().engine(rank).shut_down();
  });
  CHECK_EQ(data[0][0], 2.0F);
  CHECK_EQ(fake_gpu::count(0, "ncclCommDestroy"), 1);
}

// Also if that is longer than the timeout of waits for other ranks: no caller would learn that the result is wrong.
TEST(a_device_that_is_busy_when_the_job_ends_gets_as_long_as_it_needs) {
  std::vector<float> data(kCount, 1.0F);
  char* memory = reinterpret_cast<char*>(data.data());
  EngineOptions options = on_double();
  options.leave_timeout = kMillisecond;
  GpuJob job(1, options);
  fake_gpu::hold(job.stream(0));
  fake_gpu::compute(job.stream(0), memory, kCount * sizeof(float), [&] { data.assign(kCount, 2.0F); });
  auto operation = allreduce();
  operation->signature.prescale = 3;
  const int64_t handle = job.enqueue(0, operation, {memory}, {memory});
  job.job().wait_only(0, handle);
  std::thread leaving([&] { job.job().engine(0).shut_down(); });
  HandleTable& table = job.job().handles(0);
  CHECK_EQ(table.wait_for_results(&handle, 1, now_ns() + 100 * options.leave_timeout), HVL_IN_PROGRESS);
  fake_gpu::release(job.stream(0));
  leaving.join();
  CHECK_EQ(job.wait(0, handle).message(), "");
  CHECK_EQ(job.job().engine(0).job_status().code(), HVL_SHUT_DOWN);
  CHECK_EQ(data[kCount - 1], 6.0F);
  CHECK_EQ(fake_gpu::count(0, "ncclCommAbort"), 0);
}

// For some seconds at most: what follows fails then.
void wait_until(const std::function<bool()>& condition) {
  const uint64_t deadline = now_ns() + kPatience / 4;
  while (!condition() && now_ns() < deadline) std::this_thread::yield();
}

// The ranks have agreed, so only the device's own rank can see that it makes no progress.
TEST(a_device_that_does_not_get_on_breaks_the_job) {
  EngineOptions options = on_double();
  options.stall_shutdown = 0.2;
  for (const bool waits_for_stream : {true, false}) {
    std::vector<float> data(kCount, 1.0F);
    char* memory = reinterpret_cast<char*>(data.data());
    GpuJob job(1, options);
    check_sum(job);
    waits_for_stream ? fake_gpu::hold(job.stream(0)) : fake_gpu::hang(0, true);
    const int64_t handle = job.enqueue(0, allreduce("stuck"), {memory}, {memory});
    job.job().wait_only(0, handle);
    std::thread helped([&] {  // so that what is left on the device comes to its end
      wait_until([] { return fake_gpu::count(0, "ncclCommAbort") > 0; });
      waits_for_stream ? fake_gpu::release(job.stream(0)) : fake_gpu::hang(0, false);
    });
    const Status status = job.wait(0, handle);
    helped.join();
    CHECK_EQ(status.code(), HVL_JOB_BROKEN);
    CHECK_HAS(status.message(), "stalled: rank 0, GPU 0 did not get on with the allreduce of 'stuck'");
    CHECK_HAS(status.message(), waits_for_stream ? "the stream that makes the tensors" : "or NCCL hangs");
  }
}

TEST(staging_says_that_it_is_the_device_that_does_not_get_on) {
  EngineOptions options = on_double(GpuOperations::kStaging);
  options.stall_shutdown = 0.2;
  std::vector<float> data(kCount, 1.0F);
  char* memory = reinterpret_cast<char*>(data.data());
  GpuJob job(1, options);
  fake_gpu::hold(job.stream(0));
  const int64_t handle = job.enqueue(0, allreduce(), {memory}, {memory});
  wait_until([&] { return job.job().engine(0).memory()->is_broken(); });
  fake_gpu::release(job.stream(0));
  const Status status = job.wait(0, handle);
  CHECK_EQ(status.code(), HVL_JOB_BROKEN);
  CHECK_HAS(status.message(), "stalled: rank 0, GPU 0 did not get on with a copy to the host");
  CHECK_HAS(status.message(), "what its streams were given before");
}

TEST(staging_gets_as_long_as_its_device_needs_when_the_job_ends) {
  EngineOptions options = on_double(GpuOperations::kStaging);
  options.leave_timeout = kMillisecond;
  std::vector<float> data(kCount, 1.0F);
  char* memory = reinterpret_cast<char*>(data.data());
  GpuJob job(1, options);
  fake_gpu::hold(job.stream(0));
  auto operation = allreduce();
  operation->signature.prescale = 3;
  const int64_t handle = job.enqueue(0, operation, {memory}, {memory});
  wait_until([] { return fake_gpu::count(0, "cuMemcpyDtoHAsync") > 0; });
  std::thread leaving([&] { job.job().engine(0).shut_down(); });
  CHECK_EQ(job.job().handles(0).wait(handle, now_ns() + 100 * options.leave_timeout), HVL_IN_PROGRESS);
  fake_gpu::release(job.stream(0));
  leaving.join();
  CHECK_EQ(job.wait(0, handle).message(), "");
  CHECK_EQ(data[kCount - 1], 3.0F);
}

// No engine watches the device any more. The caller does not wait, so it must detect the failure by polling often.
TEST(a_device_that_fails_is_found_out_by_who_asks) {
  GpuJob job(1);
  std::vector<std::vector<float>> data(3, std::vector<float>(kCount, 1.0F));
  std::vector<int64_t> handles;
  for (std::vector<float>& each : data) {
    char* memory = reinterpret_cast<char*>(each.data());
    handles.push_back(job.enqueue(0, allreduce(), {memory}, {memory}));
    job.job().wait_only(0, handles.back());
  }
  job.job().shut_down();
  fake_gpu::fail(0, "cuEventQuery", kIllegalAddress);
  HandleTable& table = job.job().handles(0);
  hvl_status state = HVL_IN_PROGRESS;
  for (const uint64_t deadline = now_ns() + 10 * kSecond; state != HVL_OK && now_ns() < deadline;) {
    state = table.wait_for_results(handles.data(), handles.size(), now_ns());
  }
  CHECK_EQ(state, HVL_OK);
  fake_gpu::fail(0, "cuEventQuery", 0);
  for (int64_t handle : handles) CHECK_HAS(job.wait(0, handle).message(), "CUDA_ERROR_ILLEGAL_ADDRESS");
}

}  // namespace
}  // namespace hvl
