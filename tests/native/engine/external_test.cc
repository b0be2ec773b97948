// The data plane over another library's functions, held against our own: the same bits, whatever is done.

#include <cstdlib>
#include <limits>

#include "check.h"
#include "job_of_threads.h"
#include "library_of_threads.h"
#include "typed_tensors.h"

namespace hvl {
namespace {

constexpr uint64_t kBuffer = 4096;
constexpr uint64_t kInPlace = 8192;

EngineOptions through(LibraryOfThreads* library) {
  EngineOptions options;
  options.external = ExternalOptions{library->functions(), kBuffer, kInPlace};
  return options;
}

// Runs it with tensors of other memory than its results, and appends these.
void run(Job& job, int rank, const std::shared_ptr<Operation>& operation, Bytes* results) {
  std::vector<Bytes> given;
  std::vector<Bytes> made;
  std::vector<const char*> inputs;
  std::vector<char*> outputs;
  const int64_t parts = parts_of(operation->signature, job.size());
  for (const TensorSignature& tensor : operation->signature.tensors) {
    given.push_back(tensor_of(tensor.dtype, parts * tensor.shape[0], rank));
    made.emplace_back(given.back().size());
  }
  for (size_t t = 0; t < given.size(); ++t) {
    inputs.push_back(given[t].data());
    outputs.push_back(made[t].data());
  }
  const bool allocated = allocates(operation->signature.kind);
  std::vector<hvl_output> handed_over;
  const int64_t handle = job.enqueue(rank, operation, inputs, allocated ? std::vector<char*>() : outputs);
  CHECK_EQ(job.wait(rank, handle, &handed_over).message(), "");
  for (hvl_output& output : handed_over) {
    const char* data = static_cast<const char*>(output.data);
    results->insert(results->end(), data, data + output.num_bytes);
    free(output.data);
  }
  for (const Bytes& output : made) results->insert(results->end(), output.begin(), output.end());
  for (size_t t = 0; t < given.size(); ++t) {
    const TensorSignature& tensor = operation->signature.tensors[t];
    CHECK(given[t] == tensor_of(tensor.dtype, parts * tensor.shape[0], rank));
  }
}

// Each rank has the same results through the library as through shared memory.
void check_same_bits(int size, const std::function<void(Job& job, int rank, Bytes* results)>& work) {
  LibraryOfThreads library;
  std::vector<Bytes> results[2];
  for (const bool external : {true, false}) {
    Job job(size, external ? through(&library) : EngineOptions());
    std::vector<Bytes>& of_ranks = results[external ? 0 : 1];
    of_ranks.resize(static_cast<size_t>(size));
    job.on_all([&](int rank) { work(job, rank, &of_ranks[static_cast<size_t>(rank)]); });
  }
  for (size_t rank = 0; rank < static_cast<size_t>(size); ++rank) {
    CHECK(!results[1][rank].empty());
    CHECK(results[0][rank] == results[1][rank]);
  }
  CHECK_EQ(library.num_broken.load(), 0);
  const auto most = std::max(kInPlace, 4096 * static_cast<uint64_t>(size));
  CHECK(library.longest.load() <= static_cast<int64_t>(most));
}

TEST(reductions_of_every_type) {
  for (int size : {2, 3, 5}) {
    check_same_bits(size, [](Job& job, int rank, Bytes* results) {
      for (Kind kind : {HVL_ALLREDUCE, HVL_REDUCESCATTER, HVL_REDUCE}) {
        const int root = kind == HVL_REDUCE ? 1 : -1;
        for (ReduceOp op : {HVL_SUM, HVL_AVERAGE, HVL_MIN, HVL_MAX, HVL_PRODUCT}) {
          for (DataType dtype : kDataTypes) {
            if (why_not_reducible(dtype, op) != nullptr) continue;
            if (is_left_out(dtype, op)) continue;
            auto operation = operation_of(kind, {dtype}, op, root);
            run(job, rank, operation, results);
            auto scaled = operation_of(kind, {dtype}, op, root);
            scaled->signature.prescale = 0.5;
            scaled->signature.postscale = 1.5;
            run(job, rank, scaled, results);
          }
        }
      }
    });
  }
}

TEST(types_that_are_mixed) {
  check_same_bits(3, [](Job& job, int rank, Bytes* results) {
    for (Kind kind : {HVL_ALLREDUCE, HVL_REDUCESCATTER, HVL_BROADCAST, HVL_ALLGATHER, HVL_REDUCE, HVL_SCATTER}) {
      const int root = has_root(kind) ? 1 : -1;
      run(job, rank, operation_of(kind, {HVL_FLOAT32, HVL_FLOAT64, HVL_INT8, HVL_FLOAT16}, HVL_SUM, root), results);
    }
  });
}

TEST(collectives_that_only_move) {
  for (int size : {2, 3, 4}) {
    check_same_bits(size, [size](Job& job, int rank, Bytes* results) {
      for (DataType dtype : {HVL_UINT8, HVL_FLOAT64}) {
        for (int root = 0; root < size; ++root) {
          run(job, rank, operation_of(HVL_BROADCAST, {dtype}, HVL_SUM, root), results);
          run(job, rank, operation_of(HVL_SCATTER, {dtype}, HVL_SUM, root), results);
        }
        for (Kind kind : {HVL_ALLGATHER, HVL_GATHER}) {
          auto gathered = operation_of(kind, {dtype}, HVL_SUM, kind == HVL_GATHER ? size - 1 : -1);
          for (TensorSignature& tensor : gathered->signature.tensors) tensor.shape[0] *= rank;  // rank 0 has none
          run(job, rank, gathered, results);
        }
        auto exchanged = operation_of(HVL_ALLTOALL, {dtype}, HVL_SUM);
        for (const TensorSignature& tensor : exchanged->signature.tensors) {
          int64_t left = tensor.shape[0];
          for (int to = 0; to < size; ++to) {
            const int64_t rows = to + 1 == size ? left : (left * (rank + to)) / (3 * size);
            exchanged->signature.arguments.push_back(rows);
            left -= rows;
          }
        }
        run(job, rank, exchanged, results);
      }
    });
  }
}

TEST(adasum) {
  for (int size : {2, 3}) {
    check_same_bits(size, [](Job& job, int rank, Bytes* results) {
      run(job, rank, operation_of(HVL_ALLREDUCE, {HVL_FLOAT32}, HVL_ADASUM), results);
    });
  }
}

TEST(in_place) {
  check_same_bits(3, [](Job& job, int rank, Bytes* results) {
    for (DataType dtype : {HVL_FLOAT32, HVL_INT32}) {
      for (int64_t count : {1, 1009, 20011}) {
        auto operation = operation_of(HVL_ALLREDUCE, {dtype}, HVL_AVERAGE);
        operation->signature.tensors = {{dtype, {count}}};
        operation->num_bytes = {operation->signature.tensors[0].num_bytes()};
        operation->signature.prescale = 0.5;
        Bytes data = tensor_of(dtype, count, rank);
        CHECK_EQ(job.run(rank, operation, data.data()).message(), "");
        results->insert(results->end(), data.begin(), data.end());
      }
    }
  });
}

// Rank 1 is alone in a set, 0 and 2 have one, and then one after the other joins.
TEST(teams) {
  check_same_bits(3, [](Job& job, int rank, Bytes* results) {
    const std::vector<std::vector<int64_t>> sets = {{0, 2}, {1}};
    for (const std::vector<int64_t>& ranks : sets) {
      auto addition = make("add", HVL_ADD_PROCESS_SET, {});
      addition->signature.arguments = ranks;
      run(job, rank, addition, results);
    }
    for (Kind kind : {HVL_ALLREDUCE, HVL_REDUCESCATTER, HVL_ALLGATHER}) {
      auto operation = operation_of(kind, {HVL_FLOAT32, HVL_INT16}, HVL_SUM);
      operation->signature.process_set = rank == 1 ? 2 : 1;
      run(job, rank, operation, results);
      run(job, rank, operation_of(kind, {HVL_FLOAT32, HVL_INT16}, HVL_SUM), results);
    }
    for (int round = 0; round < 2; ++round) {
      for (int step = 0; step <= rank; ++step) {
        run(job, rank, operation_of(HVL_ALLREDUCE, {HVL_FLOAT32, HVL_INT16}, HVL_AVERAGE), results);
        run(job, rank, operation_of(HVL_REDUCESCATTER, {HVL_FLOAT32, HVL_INT16}, HVL_SUM), results);
        for (Kind kind : {HVL_GATHER, HVL_SCATTER, HVL_REDUCE}) {
          run(job, rank, operation_of(kind, {HVL_FLOAT32, HVL_INT16}, HVL_SUM, 2), results);
        }
      }
      run(job, rank, make("join", HVL_JOIN, {}), results);
    }
  });
}

template <typename Real>
void check_nans(DataType dtype) {
  LibraryOfThreads library;
  Job job(3, through(&library));
  std::vector<Real> results[3];
  const Real nan = std::numeric_limits<Real>::quiet_NaN();
  job.on_all([&](int rank) {
    std::vector<Real>& data = results[rank];
    data = {rank == 1 ? -nan : nan, rank == 2 ? nan : Real{1}, rank == 0 ? -nan : Real{1}, Real{1}};
    auto operation = make("nan", HVL_ALLREDUCE, {{4}});
    operation->signature.tensors[0].dtype = dtype;
    operation->num_bytes[0] = operation->total_bytes = operation->signature.tensors[0].num_bytes();
    CHECK_EQ(job.run(rank, operation, data.data()).message(), "");
  });
  CHECK(results[0][0] != results[0][0] && results[0][1] != results[0][1] && results[0][2] != results[0][2]);
  CHECK_EQ(results[0][3], Real{3});
  for (const std::vector<Real>& result : results) {
    CHECK(memcmp(result.data(), results[0].data(), result.size() * sizeof(Real)) == 0);
  }
}

TEST(all_ranks_have_the_same_bits_of_nan) {
  check_nans<float>(HVL_FLOAT32);
  check_nans<double>(HVL_FLOAT64);
}

TEST(a_library_that_fails_breaks_the_job) {
  struct Case {
    const char* function;
    Kind kind;
    ReduceOp op;
  };
  const std::vector<Case> cases = {{"allreduce", HVL_ALLREDUCE, HVL_SUM},
                                   {"alltoallv", HVL_ALLREDUCE, HVL_MAX},
                                   {"allgatherv", HVL_ALLREDUCE, HVL_MAX},
                                   {"broadcast", HVL_BROADCAST, HVL_SUM},
                                   {"reducescatter", HVL_REDUCESCATTER, HVL_SUM},
                                   {"reducescatter", HVL_REDUCE, HVL_SUM},
                                   {"alltoallv", HVL_REDUCE, HVL_SUM}};
  for (const Case& each : cases) {
    LibraryOfThreads library;
    library.failing = each.function;
    Job job(3, through(&library));
    job.on_all([&](int rank) {
      std::vector<float> data(5, 1.0F);
      const int root = has_root(each.kind) ? 0 : -1;
      const Status status = job.run(rank, make("x", each.kind, {{5}}, each.op, root), data.data());
      CHECK_EQ(status.code(), HVL_JOB_BROKEN);
      CHECK_EQ(status.message(),
               "rank 1: the library is out of order. In flight here: " + std::string(name_of(each.kind)) + " of 'x'");
    });
    CHECK_EQ(library.num_broken.load(), 3);
  }
}

TEST(memory_that_a_failed_library_may_write_to_is_not_freed) {
  LibraryOfThreads library;
  library.failing = "allgatherv";
  {
    Job job(3, through(&library));
    job.on_all([&](int rank) {
      std::vector<float> data(5, 1.0F);
      CHECK_EQ(job.run(rank, make("x", HVL_ALLGATHER, {{5}}), data.data()).code(), HVL_JOB_BROKEN);
    });
  }
  library.write_late();
}

}  // namespace
}  // namespace hvl
