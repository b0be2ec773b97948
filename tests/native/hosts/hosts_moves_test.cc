// Allgather, alltoall and reducescatter over several hosts, of as many rows as one likes.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "check.h"
#include "hosts_job.h"

namespace hvl {
namespace {

// 0 among them, and more than a slot.
int64_t rows_of(int rank, int round) { return (rank * 3 + round) % 5 * (round == 2 ? 700 : 1); }

TEST(allgather_of_uneven_rows) {
  on_all_places([](Job& job) {
    job.on_all([&](int rank) {
      for (int round = 0; round < 5; ++round) {
        std::vector<float> data(static_cast<size_t>(rows_of(rank, round) * 3) + 1);
        for (size_t i = 0; i < data.size(); ++i) data[i] = value(rank, i);
        auto operation = make("g", HVL_ALLGATHER, {{rows_of(rank, round), 3}});
        std::vector<hvl_output> outputs;
        const int64_t handle = job.enqueue(rank, operation, {reinterpret_cast<char*>(data.data())}, {});
        CHECK_EQ(job.wait(rank, handle, &outputs).message(), "");
        REQUIRE(outputs.size() == 1);
        const float* next = static_cast<float*>(outputs[0].data);
        size_t num_wrong = 0;
        for (int other = 0; other < job.size(); ++other) {
          for (size_t i = 0; i < static_cast<size_t>(rows_of(other, round) * 3); ++i) {
            num_wrong += *next++ == value(other, i) ? 0 : 1;
          }
        }
        CHECK_EQ(num_wrong, size_t{0});
        CHECK_EQ(reinterpret_cast<const char*>(next) - static_cast<char*>(outputs[0].data), outputs[0].num_bytes);
        free(outputs[0].data);
      }
    });
  });
}

TEST(an_allgather_of_a_group) {
  on_all_places([](Job& job) {
    job.on_all([&](int rank) {
      const std::vector<float> many(3000, static_cast<float>(rank)), one(1, static_cast<float>(-rank));
      const int64_t num_many = rank == 1 ? 0 : 3000;
      auto operation = make("group", HVL_ALLGATHER, {{num_many}, {1}, {0}});
      const std::vector<const char*> inputs = {reinterpret_cast<const char*>(many.data()),
                                               reinterpret_cast<const char*>(one.data()), nullptr};
      for (int round = 0; round < 3; ++round) {
        std::vector<hvl_output> outputs;
        CHECK_EQ(job.wait(rank, job.enqueue(rank, operation, inputs, {}), &outputs).message(), "");
        REQUIRE(outputs.size() == 3);
        CHECK_EQ(outputs[0].shape[0], 3000 * (job.size() - 1));
        const float* of_many = static_cast<const float*>(outputs[0].data);
        for (int other = 0; other < job.size(); ++other) {
          CHECK_EQ(static_cast<const float*>(outputs[1].data)[other], static_cast<float>(-other));
          if (other == 1) continue;
          CHECK_EQ(*of_many, static_cast<float>(other));
          CHECK_EQ(of_many[2999], static_cast<float>(other));
          of_many += 3000;
        }
        CHECK_EQ(outputs[2].num_bytes, 0);
        for (hvl_output& output : outputs) free(output.data);
      }
    });
  });
}

int64_t rows_between(int from, int to, int round) { return (from * 3 + to * 2 + round) % 5 * (round == 2 ? 700 : 1); }

float sent_value(int from, int to, int64_t i) { return static_cast<float>(100 * from + 10 * to + i % 7); }

TEST(alltoall_of_uneven_splits) {
  on_all_places([](Job& job) {
    job.on_all([&](int rank) {
      for (int round = 0; round < 5; ++round) {
        auto operation = make("a2a", HVL_ALLTOALL, {});
        std::vector<float> sent;
        for (int to = 0; to < job.size(); ++to) {
          const int64_t rows = rows_between(rank, to, round);
          operation->signature.arguments.push_back(rows);
          for (int64_t i = 0; i < 3 * rows; ++i) sent.push_back(sent_value(rank, to, i));
        }
        const int64_t rows = static_cast<int64_t>(sent.size()) / 3;
        operation->signature.tensors = {TensorSignature{HVL_FLOAT32, {rows, 3}}};
        operation->num_bytes = {operation->signature.num_bytes()};
        sent.push_back(0);  // an address
        std::vector<hvl_output> outputs;
        const char* input = reinterpret_cast<const char*>(sent.data());
        CHECK_EQ(job.wait(rank, job.enqueue(rank, operation, {input}, {}), &outputs).message(), "");
        REQUIRE(outputs.size() == 2);
        const float* next = static_cast<const float*>(outputs[0].data);
        size_t num_wrong = 0;
        for (int from = 0; from < job.size(); ++from) {
          CHECK_EQ(static_cast<const int32_t*>(outputs[1].data)[from], rows_between(from, rank, round));
          for (int64_t i = 0; i < 3 * rows_between(from, rank, round); ++i) {
            num_wrong += *next++ == sent_value(from, rank, i) ? 0 : 1;
          }
        }
        CHECK_EQ(num_wrong, size_t{0});
        CHECK_EQ((next - static_cast<const float*>(outputs[0].data)) * 4, outputs[0].num_bytes);
        for (hvl_output& output : outputs) free(output.data);
      }
    });
  });
}

void check_reducescatter(Job& job, int rank, const Reduction& reduction, int64_t rows) {
  constexpr int64_t kWidth = 3;
  const int size = job.size();
  const size_t row_bytes = kWidth * size_of(reduction.dtype);
  std::vector<Bytes> inputs;
  std::vector<const char*> sources;
  for (int other = 0; other < size; ++other) {
    inputs.push_back(random_array(reduction.dtype, static_cast<size_t>(rows * kWidth) + 1, 7u + other));
  }
  for (const Bytes& input : inputs) sources.push_back(input.data());
  const Bytes whole = reduced(reduction, sources, job.engine(rank).options().hosts, static_cast<size_t>(rows * kWidth));
  size_t begin = 0, mine = 0;
  for (int other = 0; other <= rank; ++other) {
    begin += mine;
    mine = static_cast<size_t>(rows / size + (other < rows % size ? 1 : 0));
  }
  Bytes output(mine * row_bytes + 1, 'x');
  const std::string name = std::string(name_of(reduction.dtype)) + name_of(reduction.op) + std::to_string(rows);
  const auto operation = make_of(name, HVL_REDUCESCATTER, reduction, {rows, kWidth});
  const int64_t handle = job.enqueue(rank, operation, {sources[static_cast<size_t>(rank)]}, {output.data()});
  CHECK_EQ(job.wait(rank, handle).message(), "");
  CHECK_EQ(std::memcmp(output.data(), whole.data() + begin * row_bytes, mine * row_bytes), 0);
  CHECK_EQ(output.back(), 'x');
}

TEST(reducescatter_of_uneven_rows) {
  on_all_places([](Job& job) {
    std::vector<Reduction> reductions(5);
    reductions[1].dtype = HVL_FLOAT16;
    reductions[2].dtype = HVL_INT8;
    reductions[2].postscale = 3.0;
    reductions[3].dtype = HVL_INT64;
    reductions[3].op = HVL_MAX;
    reductions[4].dtype = HVL_INT32;
    for (size_t i : {1, 4}) {
      reductions[i].op = HVL_AVERAGE;
      reductions[i].divisor = job.size();
    }
    job.on_all([&](int rank) {
      for (const Reduction& reduction : reductions) {
        for (int64_t rows : {0, 1, 5, 1009}) check_reducescatter(job, rank, reduction, rows);
      }
    });
  });
}

}  // namespace
}  // namespace hvl
