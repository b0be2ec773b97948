// The order in which streams, events and NCCL's functions are used, and that no thread waits for a GPU unnecessarily.

#include <algorithm>
#include <future>

#include "check.h"
#include "gpu_job.h"

namespace hvl {
namespace {

constexpr size_t kLength = 1000;
constexpr size_t kBytes = kLength * sizeof(float);

using Floats = std::vector<float>;

// A tensor that the GPU makes, once the rank's stream gets on.
void make_later(GpuJob& job, int rank, Floats* data) {
  fake_gpu::compute(job.stream(rank), data->data(), kBytes,
                    [=] { std::fill(data->begin(), data->end(), static_cast<float>(rank + 1)); });
}

int64_t begin_allreduce(GpuJob& job, int rank, const std::string& name, Floats* data,
                        const hvl_callbacks& callbacks = {}) {
  char* memory = reinterpret_cast<char*>(data->data());
  return job.enqueue(rank, on_gpu(make(name, HVL_ALLREDUCE, {{kLength}})), {memory}, {memory}, callbacks);
}

void consume(GpuJob& job, int rank, int64_t handle) {
  std::vector<hvl_output> outputs;
  CHECK_EQ(job.job().handles(rank).consume(handle, &outputs).message(), "");
}

// The index of the first call from `from` on that begins with `beginning`; the number of calls if there is none.
size_t find(const std::vector<std::string>& calls, const std::string& beginning, size_t from = 0) {
  const auto begins = [&](const std::string& call) { return call.compare(0, beginning.size(), beginning) == 0; };
  return static_cast<size_t>(std::find_if(calls.begin() + static_cast<std::ptrdiff_t>(from), calls.end(), begins) -
                             calls.begin());
}

TEST(a_request_is_complete_before_the_gpu_has_its_tensor) {
  GpuJob job(3);
  std::vector<Floats> data(3, Floats(kLength));
  for (int rank = 0; rank < 3; ++rank) fake_gpu::hold(job.stream(rank));
  job.job().on_all([&](int rank) {
    Floats* mine = &data[static_cast<size_t>(rank)];
    make_later(job, rank, mine);
    const int64_t handle = begin_allreduce(job, rank, "x", mine);
    job.job().wait_only(rank, handle);
    HandleTable& table = job.job().handles(rank);
    CHECK_EQ(table.wait_for_results(&handle, 1, now_ns()), HVL_IN_PROGRESS);
    CHECK_EQ((*mine)[0], 0.0F);
    CHECK_EQ(table.hold_up_for_results(&handle, 1, job.stream(rank), now_ns() + kPatience).message(), "");
    consume(job, rank, handle);
    // Work that the stream is given after that finds the result.
    fake_gpu::compute(job.stream(rank), mine->data(), kBytes, [=] {
      for (float& number : *mine) number *= 10;
    });
    fake_gpu::release(job.stream(rank));
    fake_gpu::synchronize(job.stream(rank));
    CHECK_EQ((*mine)[0], 60.0F);
    CHECK_EQ((*mine)[kLength - 1], 60.0F);
  });
}

TEST(staging_waits_for_the_tensor_and_for_no_more) {
  GpuJob job(2, on_double(GpuOperations::kStaging, 1024));
  std::vector<Floats> data(2, Floats(kLength));
  job.job().on_all([&](int rank) {
    Floats* mine = &data[static_cast<size_t>(rank)];
    fake_gpu::hold(job.stream(rank));
    make_later(job, rank, mine);
    const int64_t handle = begin_allreduce(job, rank, "x", mine);
    CHECK_EQ(job.job().engine(rank).wait(&handle, 1, now_ns() + 20 * kMillisecond), HVL_IN_PROGRESS);
    fake_gpu::release(job.stream(rank));
    CHECK_EQ(job.wait(rank, handle).message(), "");
    CHECK_EQ((*mine)[kLength - 1], 3.0F);
  });
  for (int gpu : {0, 1}) CHECK_EQ(fake_gpu::count(gpu, "nccl"), 0);
}

// Neither who looks after the device nor who waits for a result spoils it.
TEST(a_graph_is_captured_while_collectives_are_under_way) {
  for (const GpuOperations operations : {GpuOperations::kNccl, GpuOperations::kStaging}) {
    GpuJob job(2, on_double(operations));
    job.job().on_all([&](int rank) {
      void* captured = fake_gpu::make_stream(rank);
      Floats data(kLength, 1.0F);
      fake_gpu::capture(captured, true);
      for (int step = 0; step < 3; ++step) {
        CHECK_EQ(job.wait(rank, begin_allreduce(job, rank, "x", &data)).message(), "");
      }
      fake_gpu::capture(captured, false);
      CHECK_EQ(data[0], 8.0F);
    });
  }
}

// While the ranks reduce what is in one half, the other one is copied.
TEST(staging_copies_ahead) {
  GpuJob job(2, on_double(GpuOperations::kStaging, 1024));
  std::vector<Floats> data(2, Floats(kLength, 1.0F));
  job.job().on_all([&](int rank) {
    CHECK_EQ(job.wait(rank, begin_allreduce(job, rank, "x", &data[static_cast<size_t>(rank)])).message(), "");
  });
  const std::vector<std::string> calls = fake_gpu::calls(0);
  CHECK_EQ(fake_gpu::count(0, "cuMemcpyDtoHAsync engine"), 4);
  CHECK_EQ(fake_gpu::count(0, "cuMemcpyHtoDAsync engine"), 4);
  const size_t first = find(calls, "cuMemcpyDtoHAsync");
  const size_t second = find(calls, "cuMemcpyDtoHAsync", first + 1);
  const size_t third = find(calls, "cuMemcpyDtoHAsync", second + 1);
  const size_t first_back = find(calls, "cuMemcpyHtoDAsync");
  CHECK(second < first_back && first_back < third);
}

TEST(a_batch_is_one_group_between_its_events) {
  GpuJob job(2);
  job.job().on_all([&](int rank) {
    Floats first(kLength, 1.0F);
    Floats second(kLength, 2.0F);
    char* memory[] = {reinterpret_cast<char*>(first.data()), reinterpret_cast<char*>(second.data())};
    auto group = on_gpu(make("group", HVL_ALLREDUCE, {{kLength}, {kLength}}, HVL_AVERAGE));
    for (int step = 0; step < 2; ++step) {
      CHECK_EQ(job.wait(rank, job.enqueue(rank, group, {memory[0], memory[1]}, {memory[0], memory[1]})).message(), "");
    }
    CHECK_EQ(first[0], 1.0F);
    CHECK_EQ(second[0], 2.0F);
  });
  for (int gpu : {0, 1}) {
    const std::vector<std::string> calls = fake_gpu::calls(gpu);
    CHECK_EQ(fake_gpu::count(gpu, "ncclCommInitRankConfig"), 1);
    const size_t ready = find(calls, "cuEventRecord test");
    const size_t wait = find(calls, "cuStreamWaitEvent engine");
    const size_t group = find(calls, "ncclGroupStart");
    CHECK(ready < wait && wait < group);
    const std::vector<std::string> rest(calls.begin() + static_cast<std::ptrdiff_t>(std::min(group, calls.size())),
                                        calls.end());
    REQUIRE(rest.size() >= 6);
    CHECK_EQ(rest[1], "ncclAllReduce count=1000 dtype=7 op=4");
    CHECK_EQ(rest[2], "ncclAllReduce count=1000 dtype=7 op=4");
    CHECK_EQ(rest[3], "ncclGroupEnd");
    CHECK(find(rest, "cuEventRecord engine") < find(rest, "ncclGroupStart", 1));
    CHECK_EQ(fake_gpu::count(gpu, "ncclGroupStart"), 2);
    CHECK_EQ(fake_gpu::count(gpu, "cuMemcpy"), 0);
  }
}

TEST(ranks_that_enqueue_in_different_orders_call_nccl_in_one) {
  GpuJob job(4);
  job.job().on_all([&](int rank) {
    std::vector<Floats> data(6, Floats(kLength, 1.0F));
    for (int round = 0; round < 5; ++round) {
      std::vector<int64_t> handles;
      for (int i = 0; i < 6; ++i) {
        const size_t tensor = static_cast<size_t>((i * (rank % 2 == 0 ? 1 : 5) + rank) % 6);
        handles.push_back(begin_allreduce(job, rank, "x" + std::to_string(tensor), &data[tensor]));
      }
      for (int64_t handle : handles) CHECK_EQ(job.wait(rank, handle).message(), "");
    }
    for (const Floats& tensor : data) CHECK_EQ(tensor[kLength - 1], 1024.0F);
  });
}

TEST(scales_are_factors_of_the_sums) {
  GpuJob job(2);
  job.job().on_all([&](int rank) {
    Floats data(kLength, 4.0F);
    auto operation = on_gpu(make("x", HVL_ALLREDUCE, {{kLength}}));
    operation->signature.prescale = 0.5;
    for (int step = 0; step < 3; ++step) CHECK_EQ(job.run(rank, operation, data.data()).message(), "");
    CHECK_EQ(data[0], 4.0F);
  });
  CHECK_EQ(fake_gpu::count(0, "ncclRedOpCreatePreMulSum"), 1);
  CHECK_EQ(fake_gpu::count(0, "ncclAllReduce count=1000 dtype=7 op=scaled"), 3);
  job.job().shut_down();
  CHECK_EQ(fake_gpu::count(0, "ncclRedOpDestroy"), 1);
  CHECK_EQ(fake_gpu::count(0, "ncclCommDestroy"), 1);
  CHECK_EQ(fake_gpu::count(0, "ncclCommAbort"), 0);
}

// The caller's stream has been told to wait before the caller hears of it.
TEST(who_is_called_back_finds_the_result_on_his_stream) {
  GpuJob job(2);
  job.job().on_all([&](int rank) {
    Floats data(kLength);
    fake_gpu::hold(job.stream(rank));
    make_later(job, rank, &data);
    std::promise<int> told;
    hvl_callbacks callbacks{};
    callbacks.context = &told;
    callbacks.done = [](void* context, int32_t code, const char*) {
      static_cast<std::promise<int>*>(context)->set_value(code);
    };
    CHECK_EQ(begin_allreduce(job, rank, "x", &data, callbacks), 0);
    CHECK_EQ(told.get_future().get(), HVL_OK);
    CHECK_EQ(data[0], 0.0F);
    fake_gpu::compute(job.stream(rank), data.data(), kBytes, [&] { data[0] *= 10; });
    fake_gpu::release(job.stream(rank));
    fake_gpu::synchronize(job.stream(rank));
    CHECK_EQ(data[0], 30.0F);
  });
}

// Its outputs are allocated when the collective begins, and the allocator may know that they are in use by the stream.
TEST(outputs_are_not_written_before_the_stream_has_done_with_their_memory) {
  GpuJob job(2);
  job.job().on_all([&](int rank) {
    struct Reused {
      GpuJob* job;
      int rank;
      Floats memory = Floats(2 * kLength);
    } reused{&job, rank};
    hvl_callbacks callbacks{};
    callbacks.context = &reused;
    callbacks.allocate = [](void* context, int32_t, const hvl_output*) -> void* {
      auto* made = static_cast<Reused*>(context);
      fake_gpu::synchronize(made->job->stream(made->rank));  // it has come past the request's event
      fake_gpu::hold(made->job->stream(made->rank));
      fake_gpu::compute(made->job->stream(made->rank), made->memory.data(), 2 * kBytes,
                        [=] { std::fill(made->memory.begin(), made->memory.end(), -1.0F); });
      return made->memory.data();
    };
    const Floats data(kLength, static_cast<float>(rank));
    const int64_t handle = job.enqueue(rank, on_gpu(make("x", HVL_ALLGATHER, {{kLength}})),
                                       {reinterpret_cast<const char*>(data.data())}, {}, callbacks);
    job.job().wait_only(rank, handle);
    fake_gpu::release(job.stream(rank));
    CHECK_EQ(job.wait(rank, handle).message(), "");
    CHECK_EQ(reused.memory[0], 0.0F);
    CHECK_EQ(reused.memory[2 * kLength - 1], 1.0F);
  });
}

// Requests that are enqueued before any thread waits are one batch.
TEST(requests_wait_for_others_as_long_as_the_cycle_time_says) {
  EngineOptions options = on_double();
  options.cycle_time = 3600;
  GpuJob job(2, options);
  constexpr size_t kTensors = 300;
  const auto num_batches = [&](int rank) { return job.job().engine(rank).counters().batches.load(); };
  std::vector<std::vector<Floats>> data(2, std::vector<Floats>(kTensors, Floats(1, 1.0F)));
  for (bool is_known : {false, true}) {  // then each rank names all of them with one message
    std::vector<std::vector<int64_t>> handles(2);
    const int64_t before = num_batches(0);
    job.job().on_all([&](int rank) {
      const auto mine = static_cast<size_t>(rank);
      for (size_t t = 0; t < kTensors; ++t) {
        char* memory = reinterpret_cast<char*>(data[mine][t].data());
        const auto operation = on_gpu(make("x" + std::to_string(t), HVL_ALLREDUCE, {{1}}));
        handles[mine].push_back(job.enqueue(rank, operation, {memory}, {memory}));
      }
    });
    job.job().on_all([&](int rank) {
      for (int64_t handle : handles[static_cast<size_t>(rank)]) CHECK_EQ(job.wait(rank, handle).message(), "");
    });
    if (is_known) CHECK_EQ(num_batches(0) - before, 1);
  }
  for (const Floats& tensor : data[1]) CHECK_EQ(tensor[0], 4.0F);
}

TEST(an_empty_tensor_has_nothing_to_wait_for) {
  GpuJob job(2);
  job.job().on_all([&](int rank) {
    Floats data(1);
    CHECK_EQ(job.run(rank, on_gpu(make("x", HVL_ALLREDUCE, {{0}})), data.data()).message(), "");
  });
}

// By the engine's thread, which says that its memory is no part of the graph. The stream of the request is captured,
// too, by the time that it is allocated.
TEST(outputs_are_allocated_while_a_graph_is_captured) {
  GpuJob job(2);
  std::promise<void> captured;
  job.job().on_all([&](int rank) {
    Floats outputs(2 * kLength);
    hvl_callbacks callbacks{};
    callbacks.context = outputs.data();
    callbacks.allocate = [](void* context, int32_t, const hvl_output*) -> void* {
      return fake_gpu::may_allocate() ? context : nullptr;
    };
    const Floats data(kLength, static_cast<float>(rank + 1));
    if (rank == 1) captured.get_future().wait();
    const int64_t handle = job.enqueue(rank, on_gpu(make("x", HVL_ALLGATHER, {{kLength}})),
                                       {reinterpret_cast<const char*>(data.data())}, {}, callbacks);
    if (rank == 0) {
      fake_gpu::capture(job.stream(0), true);
      captured.set_value();
    }
    CHECK_EQ(job.wait(rank, handle).message(), "");
    if (rank == 0) fake_gpu::capture(job.stream(0), false);
    CHECK_EQ(outputs[0], 1.0F);
    CHECK_EQ(outputs[2 * kLength - 1], 2.0F);
  });
}

TEST(adasum_pins_as_much_as_it_needs_and_lets_go_of_it) {
  GpuJob job(2, on_double(GpuOperations::kAuto, 1024));
  job.job().on_all([&](int rank) {
    Floats data(kLength, 1.0F);
    CHECK_EQ(job.run(rank, on_gpu(make("x", HVL_ALLREDUCE, {{kLength}}, HVL_ADASUM)), data.data()).message(), "");
    CHECK_EQ(data[kLength - 1], 1.0F);
  });
  for (int gpu : {0, 1}) {
    CHECK_EQ(fake_gpu::count(gpu, "cuMemHostAlloc"), 1);
    CHECK_EQ(fake_gpu::count(gpu, "cuMemHostAlloc bytes=4096"), 1);
  }
  const uint64_t deadline = now_ns() + kPatience / 4;
  while (fake_gpu::num_pinned() > 0 && now_ns() < deadline) std::this_thread::yield();
  CHECK_EQ(fake_gpu::num_pinned(), 0);
}

}  // namespace
}  // namespace hvl
