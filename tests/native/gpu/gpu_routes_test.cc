// Rules that send some operations of tensors on GPUs through the host's memory, and others through NCCL.

#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "gpu_job.h"
#include "negotiate/routes.h"

namespace hvl {
namespace {

// The calls of NCCL, by GPU 0, for one operation of `count` elements and one of a single element.
size_t nccl_calls(GpuOperations operations, const std::vector<hvl_route>& rules, Kind kind, int64_t count) {
  EngineOptions options = on_double(operations);
  options.routes = Routes(rules);
  GpuJob job(3, options);
  job.job().on_all([&](int rank) {
    for (const int64_t size : {count, int64_t{1}}) {
      std::vector<float> data(static_cast<size_t>(size), static_cast<float>(rank + 1));
      auto operation = on_gpu(make("x" + std::to_string(size), kind, {{size}}, HVL_SUM, has_root(kind) ? 0 : -1));
      CHECK_EQ(job.run(rank, operation, data.data()).message(), "");
      CHECK_EQ(data.back(), kind == HVL_ALLREDUCE ? 6.0F : 1.0F);
    }
  });
  return fake_gpu::count(0, "ncclAllReduce") + fake_gpu::count(0, "ncclBroadcast");
}

TEST(by_operation_and_size) {
  for (const GpuOperations operations : {GpuOperations::kAuto, GpuOperations::kNccl}) {
    CHECK_EQ(nccl_calls(operations, {}, HVL_ALLREDUCE, 5000), size_t{2});
    CHECK_EQ(nccl_calls(operations, {{HVL_CUDA, HVL_ALLREDUCE, 64, HVL_STAGING}}, HVL_ALLREDUCE, 5000), size_t{1});
    const std::vector<hvl_route> staged = {{HVL_CUDA, HVL_BROADCAST, INT64_MAX, HVL_STAGING}};
    CHECK_EQ(nccl_calls(operations, staged, HVL_BROADCAST, 5000), size_t{0});
    CHECK_EQ(nccl_calls(operations, staged, HVL_ALLREDUCE, 5000), size_t{2});
  }
}

struct Carried {
  int64_t by_nccl;
  int64_t by_staging;
};

// Runs the operations in a job of some ranks, and checks by what the bytes of their tensors were carried.
void check_carried(int size, const std::vector<std::shared_ptr<Operation>>& operations, Carried expected,
                   const std::vector<hvl_route>& rules = {}) {
  EngineOptions options = on_double(GpuOperations::kNccl);
  options.routes = Routes(rules);
  GpuJob job(size, options);
  job.job().on_all([&](int rank) {
    int64_t num_bytes = 0;
    for (const auto& operation : operations) {
      std::vector<char> data(static_cast<size_t>(operation->total_bytes));
      CHECK_EQ(job.run(rank, std::make_shared<Operation>(*operation), data.data()).message(), "");
      num_bytes += operation->total_bytes;
    }
    const auto& carried = job.job().engine(rank).counters().carried_bytes;
    const uint64_t deadline = now_ns() + kPatience;
    // A thread that waits may go on before the engine notes the end.
    while (std::accumulate(carried.begin(), carried.end(), int64_t{0}) < num_bytes && now_ns() < deadline) {
      std::this_thread::yield();
    }
    CHECK_EQ(carried[HVL_NCCL].load(), expected.by_nccl);
    CHECK_EQ(carried[HVL_STAGING].load(), expected.by_staging);
  });
}

TEST(counts_the_bytes_that_each_transport_carries) {
  const auto sum = [](int64_t count) { return on_gpu(make("x" + std::to_string(count), HVL_ALLREDUCE, {{count}})); };
  check_carried(2, {sum(5000), sum(1)}, {20000, 4}, {{HVL_CUDA, HVL_ALLREDUCE, 64, HVL_STAGING}});
  const auto of_integers = [](Kind kind) {
    auto operation = on_gpu(make("integers", kind, {{200}}));
    operation->signature.tensors[0] = {HVL_INT16, {400}};  // as many bytes
    return operation;
  };
  const auto adasum = on_gpu(make("adasum", HVL_ALLREDUCE, {{300}}, HVL_ADASUM));
  for (const auto& staged : {of_integers(HVL_ALLREDUCE), of_integers(HVL_REDUCESCATTER), adasum}) {
    check_carried(2, {staged, sum(5000)}, {20000, staged->total_bytes});
  }
  check_carried(1, {sum(5000)}, {0, 0});
}

TEST(ranks_that_never_use_nccl_do_not_ask_for_it) {
  EngineOptions options = on_double(GpuOperations::kNccl);
  options.routes = Routes({{HVL_CUDA, HVL_ALLREDUCE, INT64_MAX, HVL_STAGING}});
  GpuJob job(2, options, [] { fake_gpu::make_same(1, 0); });
  job.job().on_all([&](int rank) {
    float data = 1.0F;
    CHECK_EQ(job.run(rank, on_gpu(make("x", HVL_ALLREDUCE, {{1}})), &data).message(), "");
    CHECK_EQ(data, 2.0F);
    const Status status = job.run(rank, on_gpu(make("y", HVL_BROADCAST, {{1}}, HVL_SUM, 0)), &data);
    CHECK_EQ(status.code(), HVL_JOB_BROKEN);
  });
}

}  // namespace
}  // namespace hvl
