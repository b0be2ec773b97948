// Gather, scatter and reduce, from every root, within a host and over several.
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "check.h"
#include "hosts_job.h"

namespace hvl {
namespace {

// As on_all_places(), and then within one host.
template <typename Function>
void on_hosts_and_on_one(Function&& function) {
  on_all_places(function);
  for (int size : {1, 2, 3, 4, 7}) {
    Job job(size);
    if (size % 2 == 1) job.become_impatient(20 * kMicrosecond);
    function(job);
  }
}

// Briefly the first and the last rank; otherwise all.
std::vector<int> roots_of(const Job& job) {
  if (check::is_brief && job.size() > 1) return {0, job.size() - 1};
  std::vector<int> roots(static_cast<size_t>(job.size()));
  std::iota(roots.begin(), roots.end(), 0);
  return roots;
}

// 0 among them, and more than a slot.
int64_t rows_from(int rank, int round) { return (rank * 3 + round) % 5 * (round == 2 ? 700 : 1); }

void check_gather(Job& job, int rank, int root, int round) {
  std::vector<float> data(static_cast<size_t>(rows_from(rank, round) * 3) + 1);
  for (size_t i = 0; i < data.size(); ++i) data[i] = value(rank, i);
  const float one = static_cast<float>(rank);
  auto operation = make("g", HVL_GATHER, {{rows_from(rank, round), 3}, {1}, {0, 5}}, HVL_SUM, root);
  std::vector<hvl_output> outputs;
  const int64_t handle = job.enqueue(
      rank, operation, {reinterpret_cast<char*>(data.data()), reinterpret_cast<const char*>(&one), nullptr}, {});
  CHECK_EQ(job.wait(rank, handle, &outputs).message(), "");
  REQUIRE(outputs.size() == 3);
  const float* next = static_cast<float*>(outputs[0].data);
  size_t num_wrong = 0;
  for (int other = 0; other < job.size() && rank == root; ++other) {
    for (size_t i = 0; i < static_cast<size_t>(rows_from(other, round) * 3); ++i) {
      num_wrong += *next++ == value(other, i) ? 0 : 1;
    }
    num_wrong += static_cast<const float*>(outputs[1].data)[other] == static_cast<float>(other) ? 0 : 1;
  }
  CHECK_EQ(num_wrong, size_t{0});
  CHECK_EQ(reinterpret_cast<const char*>(next) - static_cast<char*>(outputs[0].data), outputs[0].num_bytes);
  CHECK_EQ(outputs[0].shape[1], 3);
  CHECK_EQ(outputs[1].shape[0], rank == root ? job.size() : 0);
  CHECK_EQ(outputs[2].num_bytes, 0);
  for (hvl_output& output : outputs) free(output.data);
}

TEST(gathers_of_uneven_rows) {
  on_hosts_and_on_one([](Job& job) {
    job.on_all([&](int rank) {
      for (int root : roots_of(job)) {
        for (int round = 0; round < 4; ++round) check_gather(job, rank, root, round);
      }
    });
  });
}

// `count`: the elements of a part.
void check_scatter(Job& job, int rank, int root, int64_t count) {
  const size_t part = static_cast<size_t>(count);
  std::vector<float> parts(rank == root ? part * static_cast<size_t>(job.size()) + 1 : 0);
  for (size_t i = 0; i < parts.size(); ++i) parts[i] = value(root, i);
  std::vector<float> output(part + 1, -1.0F);
  float scalar = -1;
  auto operation = make("s" + std::to_string(count), HVL_SCATTER, {{count}, {}}, HVL_SUM, root);
  std::vector<float> scalars;
  for (int other = 0; other < job.size() && rank == root; ++other) scalars.push_back(static_cast<float>(other + root));
  const int64_t handle =
      job.enqueue(rank, operation, {reinterpret_cast<char*>(parts.data()), reinterpret_cast<char*>(scalars.data())},
                  {reinterpret_cast<char*>(output.data()), reinterpret_cast<char*>(&scalar)});
  CHECK_EQ(job.wait(rank, handle).message(), "");
  size_t num_wrong = 0;
  for (size_t i = 0; i < part; ++i) {
    num_wrong += output[i] == value(root, part * static_cast<size_t>(rank) + i) ? 0 : 1;
  }
  CHECK_EQ(num_wrong, size_t{0});
  CHECK_EQ(output.back(), -1.0F);
  CHECK_EQ(scalar, static_cast<float>(rank + root));
}

TEST(scatters) {
  on_hosts_and_on_one([](Job& job) {
    job.on_all([&](int rank) {
      for (int root : roots_of(job)) {
        for (int64_t count : {0, 1, 1009, 20011}) check_scatter(job, rank, root, count);
      }
    });
  });
}

// The bits of an allreduce, on the root only; the memory of the others is as it was, or there is none.
void check_reduce(Job& job, int rank, int root, const Reduction& reduction, int64_t count) {
  std::vector<Bytes> inputs;
  std::vector<const char*> sources;
  for (int other = 0; other < job.size(); ++other) {
    inputs.push_back(random_array(reduction.dtype, static_cast<size_t>(count) + 1, 7u + static_cast<unsigned>(other)));
  }
  for (const Bytes& input : inputs) sources.push_back(input.data());
  const std::vector<int>& hosts = job.engine(rank).options().hosts;
  Bytes expected = rank == root ? reduced(reduction, sources, hosts, static_cast<size_t>(count)) : Bytes();
  if (rank == root) expected.back() = 'x';
  Bytes output(rank == root ? static_cast<size_t>(count) * size_of(reduction.dtype) + 1 : 0, 'x');
  const std::string name = std::string(name_of(reduction.dtype)) + name_of(reduction.op) + std::to_string(count);
  const auto operation = make_of(name, HVL_REDUCE, reduction, {count});
  operation->signature.root = root;
  Bytes& mine = inputs[static_cast<size_t>(rank)];
  const Bytes before = mine;
  const int64_t handle = job.enqueue(rank, operation, {mine.data()}, {output.data()});
  CHECK_EQ(job.wait(rank, handle).message(), "");
  CHECK(output == expected);
  CHECK(mine == before);
  CHECK_EQ(job.run(rank, operation, mine.data()).message(), "");  // in place
  const std::ptrdiff_t length = static_cast<std::ptrdiff_t>(output.empty() ? 0 : output.size() - 1);
  CHECK(std::equal(expected.begin(), expected.begin() + length, mine.begin()));
  CHECK(rank == root || mine == before);
}

TEST(reduces_of_some_types_and_operations) {
  on_hosts_and_on_one([](Job& job) {
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
      for (int root = 0; root < job.size(); root += 2) {
        for (size_t i = 0; i < reductions.size(); ++i) {
          if (check::is_brief && (i + static_cast<size_t>(root) / 2) % 3 != 0) continue;
          for (int64_t count : {0, 1, 1009, 20011}) check_reduce(job, rank, root, reductions[i], count);
        }
      }
    });
  });
}

// Tensors of one request share chunks.
TEST(a_reduce_of_a_group) {
  on_hosts_and_on_one([](Job& job) {
    job.on_all([&](int rank) {
      const std::vector<Shape> shapes = {{3}, {0}, {}, {5003}};
      for (int root : roots_of(job)) {
        std::vector<std::vector<float>> data;
        std::vector<char*> addresses;
        for (const Shape& shape : shapes) {
          data.emplace_back(static_cast<size_t>(num_elements(shape)), static_cast<float>(rank + 1));
          addresses.push_back(reinterpret_cast<char*>(data.back().data()));
        }
        const auto operation = make("group", HVL_REDUCE, shapes, HVL_SUM, root);
        const int64_t handle = job.enqueue(rank, operation, {addresses.begin(), addresses.end()}, addresses);
        CHECK_EQ(job.wait(rank, handle).message(), "");
        const int sum = job.size() * (job.size() + 1) / 2;
        const float expected = static_cast<float>(rank == root ? sum : rank + 1);
        for (const auto& tensor : data) {
          CHECK_EQ(std::count(tensor.begin(), tensor.end(), expected), static_cast<std::ptrdiff_t>(tensor.size()));
        }
      }
    });
  });
}

}  // namespace
}  // namespace hvl
