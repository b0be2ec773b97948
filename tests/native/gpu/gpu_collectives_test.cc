// Collectives of tensors on GPUs, held against those of the CPU: through NCCL, through the host's memory, and both.

#include <cstdlib>

#include "check.h"
#include "gpu_job.h"
#include "typed_tensors.h"

namespace hvl {
namespace {

// Types and sizes take the same ways through the engine's threads.
std::vector<int> sizes(const std::vector<int>& all) { return check::is_brief ? std::vector<int>{3} : all; }

const std::vector<DataType> kTypes = check::is_brief
                                         ? std::vector<DataType>{HVL_FLOAT32, HVL_INT16, HVL_FLOAT16}
                                         : std::vector<DataType>(std::begin(kDataTypes), std::end(kDataTypes));

// Runs it with tensors of other memory than its results, and appends these.
void run(GpuJob& job, int rank, const std::shared_ptr<Operation>& operation, Bytes* results) {
  std::vector<Bytes> given;
  std::vector<Bytes> made;
  std::vector<const char*> inputs;
  std::vector<char*> outputs;
  for (const TensorSignature& tensor : operation->signature.tensors) {
    given.push_back(tensor_of(tensor.dtype, parts_of(operation->signature, job.job().size()) * tensor.shape[0], rank));
    made.emplace_back(given.back().size());
  }
  for (size_t t = 0; t < given.size(); ++t) {
    inputs.push_back(given[t].data());
    outputs.push_back(made[t].data());
  }
  Allocated allocated;
  const bool allocating = allocates(operation->signature.kind);
  const int64_t handle = job.enqueue(rank, operation, inputs, allocating ? std::vector<char*>() : outputs,
                                     allocating ? allocated.callbacks() : hvl_callbacks{});
  CHECK_EQ(job.wait(rank, handle).message(), "");
  for (const Bytes& output : allocating ? allocated.outputs : made) {
    results->insert(results->end(), output.begin(), output.end());
  }
}

using Program = std::function<void(GpuJob& job, int rank, bool gpu, Bytes* results)>;

std::vector<Bytes> results_of(GpuJob& job, bool gpu, const Program& program) {
  std::vector<Bytes> results(static_cast<size_t>(job.job().size()));
  job.job().on_all([&](int rank) { program(job, rank, gpu, &results[static_cast<size_t>(rank)]); });
  return results;
}

// The same bits with tensors on the CPU and on GPUs.
void check_same_bits(
    int size, const Program& program, const EngineOptions& options = on_double(),
    const std::function<void()>& prepare = [] {}) {
  std::vector<Bytes> expected;
  {
    GpuJob on_cpu(size);
    expected = results_of(on_cpu, false, program);
  }
  GpuJob job(size, options, prepare);
  const std::vector<Bytes> results = results_of(job, true, program);
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    CHECK(!expected[rank].empty());
    CHECK(results[rank] == expected[rank]);
  }
}

std::shared_ptr<Operation> placed(std::shared_ptr<Operation> operation, bool gpu) {
  return gpu ? on_gpu(std::move(operation)) : operation;
}

void reduce_every_type(GpuJob& job, int rank, bool gpu, Bytes* results) {
  for (Kind kind : {HVL_ALLREDUCE, HVL_REDUCESCATTER, HVL_REDUCE}) {
    const int root = kind == HVL_REDUCE ? 0 : -1;
    for (ReduceOp op : {HVL_SUM, HVL_AVERAGE, HVL_MIN, HVL_MAX, HVL_PRODUCT}) {
      for (DataType dtype : kTypes) {
        if (why_not_reducible(dtype, op) != nullptr) continue;
        if (check::is_brief && (op == HVL_MIN || op == HVL_PRODUCT)) continue;
        run(job, rank, placed(operation_of(kind, {dtype}, op, root), gpu), results);
        auto scaled = operation_of(kind, {dtype}, op, root);
        scaled->signature.prescale = 0.5;
        scaled->signature.postscale = 1.5;
        run(job, rank, placed(scaled, gpu), results);
      }
    }
  }
}

void move(GpuJob& job, int rank, bool gpu, Bytes* results) {
  const int size = job.job().size();
  for (DataType dtype : {HVL_UINT8, HVL_INT16, HVL_FLOAT64}) {
    for (int root = 0; root < size; ++root) {
      for (Kind kind : {HVL_BROADCAST, HVL_GATHER, HVL_SCATTER}) {
        run(job, rank, placed(operation_of(kind, {dtype}, HVL_SUM, root), gpu), results);
      }
    }
    run(job, rank, placed(operation_of(HVL_ALLGATHER, {dtype}, HVL_SUM), gpu), results);
    auto uneven = operation_of(HVL_ALLGATHER, {dtype}, HVL_SUM);
    for (TensorSignature& tensor : uneven->signature.tensors) tensor.shape[0] *= rank;  // rank 0 has none
    run(job, rank, placed(uneven, gpu), results);
    auto exchanged = operation_of(HVL_ALLTOALL, {dtype}, HVL_SUM);
    for (const TensorSignature& tensor : exchanged->signature.tensors) {
      int64_t left = tensor.shape[0];
      for (int to = 0; to < size; ++to) {
        const int64_t rows = to + 1 == size ? left : (left * (rank + to)) / (3 * size);
        exchanged->signature.arguments.push_back(rows);
        left -= rows;
      }
    }
    run(job, rank, placed(exchanged, gpu), results);
  }
}

TEST(reductions_of_every_type) {
  for (int size : sizes({1, 2, 3, 4})) check_same_bits(size, reduce_every_type);
}

TEST(reductions_through_the_memory_of_the_host) {
  for (int size : sizes({1, 3})) check_same_bits(size, reduce_every_type, on_double(GpuOperations::kStaging));
}

TEST(collectives_that_only_move) {
  for (int size : sizes({1, 2, 3, 4})) check_same_bits(size, move);
}

TEST(moves_through_the_memory_of_the_host) {
  for (int size : sizes({1, 2, 3, 4})) check_same_bits(size, move, on_double(GpuOperations::kStaging));
}

TEST(nccl_that_needs_time_for_each_call) {
  check_same_bits(3, move, on_double(), [] { fake_gpu::set_polls(40); });
}

TEST(types_that_are_mixed) {
  const Program program = [](GpuJob& job, int rank, bool gpu, Bytes* results) {
    for (Kind kind : {HVL_ALLREDUCE, HVL_REDUCESCATTER, HVL_BROADCAST, HVL_ALLGATHER, HVL_REDUCE}) {
      const int root = has_root(kind) ? 1 : -1;
      const std::vector<DataType> dtypes = {HVL_FLOAT32, HVL_INT16, HVL_FLOAT64, HVL_UINT16, HVL_FLOAT16};
      run(job, rank, placed(operation_of(kind, dtypes, HVL_SUM, root), gpu), results);
    }
  };
  check_same_bits(3, program);
  check_same_bits(2, program, on_double(GpuOperations::kStaging));
}

TEST(adasum) {
  for (int size : sizes({1, 2, 3})) {
    check_same_bits(size, [](GpuJob& job, int rank, bool gpu, Bytes* results) {
      for (int round = 0; round < 2; ++round) {
        run(job, rank, placed(operation_of(HVL_ALLREDUCE, {HVL_FLOAT32, HVL_FLOAT16}, HVL_ADASUM), gpu), results);
      }
    });
  }
}

TEST(in_place) {
  const Program program = [](GpuJob& job, int rank, bool gpu, Bytes* results) {
    for (Kind kind : {HVL_ALLREDUCE, HVL_BROADCAST}) {
      for (DataType dtype : {HVL_FLOAT32, HVL_INT16}) {
        for (int64_t count : {1, 1009, 20011}) {
          auto operation = operation_of(kind, {dtype}, HVL_SUM, kind == HVL_BROADCAST ? 1 : -1);
          operation->signature.tensors = {{dtype, {count}}};
          operation->num_bytes = {operation->signature.tensors[0].num_bytes()};
          Bytes data = tensor_of(dtype, count, rank);
          CHECK_EQ(job.run(rank, placed(operation, gpu), data.data()).message(), "");
          results->insert(results->end(), data.begin(), data.end());
        }
      }
    }
  };
  check_same_bits(3, program);
  check_same_bits(2, program, on_double(GpuOperations::kStaging));
}

// Rank 1 is alone in a set, 0 and 2 have one, and then one after the other joins.
TEST(teams) {
  const Program program = [](GpuJob& job, int rank, bool gpu, Bytes* results) {
    const std::vector<std::vector<int64_t>> sets = {{0, 2}, {1}};
    for (const std::vector<int64_t>& ranks : sets) {
      auto addition = make("add", HVL_ADD_PROCESS_SET, {});
      addition->signature.arguments = ranks;
      run(job, rank, addition, results);
    }
    for (Kind kind : {HVL_ALLREDUCE, HVL_REDUCESCATTER, HVL_ALLGATHER}) {
      auto operation = operation_of(kind, {HVL_FLOAT32, HVL_INT16}, HVL_SUM);
      operation->signature.process_set = rank == 1 ? 2 : 1;
      run(job, rank, placed(operation, gpu), results);
      run(job, rank, placed(operation_of(kind, {HVL_FLOAT32, HVL_INT16}, HVL_SUM), gpu), results);
    }
    for (int round = 0; round < 2; ++round) {
      for (int step = 0; step <= rank; ++step) {
        run(job, rank, placed(operation_of(HVL_ALLREDUCE, {HVL_FLOAT32, HVL_INT16}, HVL_AVERAGE), gpu), results);
        run(job, rank, placed(operation_of(HVL_REDUCESCATTER, {HVL_FLOAT32, HVL_INT16}, HVL_MAX), gpu), results);
      }
      run(job, rank, make("join", HVL_JOIN, {}), results);
    }
    auto removal = make("remove", HVL_REMOVE_PROCESS_SET, {});
    removal->signature.arguments = {1};
    run(job, rank, removal, results);
    run(job, rank, placed(operation_of(HVL_ALLREDUCE, {HVL_FLOAT32}, HVL_SUM), gpu), results);
  };
  check_same_bits(3, program);
  check_same_bits(3, program, on_double(GpuOperations::kStaging));
}

TEST(ranks_that_share_a_gpu_do_not_use_nccl) {
  const auto share = [] { fake_gpu::make_same(0, 2); };
  check_same_bits(3, move, on_double(), share);
  for (int gpu : {0, 1, 2}) CHECK_EQ(fake_gpu::count(gpu, "ncclCommInitRankConfig"), 0);
}

// The ranks of both hosts introduce themselves over TCP, and stage over it.
TEST(several_hosts) {
  for (const GpuOperations operations : {GpuOperations::kNccl, GpuOperations::kStaging}) {
    EngineOptions options = on_double(operations);
    options.hosts = {0, 0, 1};
    const Program program = [](GpuJob& job, int rank, bool gpu, Bytes* results) {
      move(job, rank, gpu, results);
      for (DataType dtype : {HVL_FLOAT32, HVL_INT16}) {
        run(job, rank, placed(operation_of(HVL_ALLREDUCE, {dtype}, HVL_SUM), gpu), results);
        run(job, rank, placed(operation_of(HVL_REDUCESCATTER, {dtype}, HVL_SUM), gpu), results);
      }
      run(job, rank, placed(operation_of(HVL_ALLREDUCE, {HVL_FLOAT32}, HVL_ADASUM), gpu), results);
    };
    check_same_bits(3, program, options);
  }
}

TEST(waits_that_are_interrupted) {
  for (const GpuOperations operations : {GpuOperations::kAuto, GpuOperations::kStaging}) {
    GpuJob job(3, on_double(operations), [] { fake_gpu::set_polls(20); });
    job.job().become_impatient(20 * kMicrosecond);
    job.job().on_all([&](int rank) {
      for (int round = 0; round < 20; ++round) {
        std::vector<float> data(5000, static_cast<float>(rank + round));
        auto operation = on_gpu(make("x", HVL_ALLREDUCE, {{5000}}));
        CHECK_EQ(job.run(rank, operation, data.data()).message(), "");
        CHECK_EQ(data[4999], static_cast<float>(3 + 3 * round));
      }
    });
  }
}

}  // namespace
}  // namespace hvl
