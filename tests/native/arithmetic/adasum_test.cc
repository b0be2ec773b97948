// Adasum against its definition, and the memory that it takes.
#include "collective/adasum.h"

#include <cmath>
#include <cstdlib>
#include <numeric>

#include "check.h"
#include "collective/loopback.h"
#include "job_of_threads.h"
#include "teams.h"

namespace hvl {
namespace {

// Of one vector after the other, as its definition says.
std::vector<double> adasum_of(std::vector<std::vector<double>> vectors) {
  while (vectors.size() > 1) {
    std::vector<std::vector<double>> next;
    for (size_t first = 0; first < vectors.size(); first += 2) {
      next.push_back(vectors[first]);
      if (first + 1 == vectors.size()) continue;
      const std::vector<double>& a = vectors[first];
      const std::vector<double>& b = vectors[first + 1];
      const double product = std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
      const double of_a = std::inner_product(a.begin(), a.end(), a.begin(), 0.0);
      const double of_b = std::inner_product(b.begin(), b.end(), b.begin(), 0.0);
      for (size_t i = 0; i < a.size(); ++i) {
        next.back()[i] =
            (of_a > 0 ? 1 - product / (2 * of_a) : 1) * a[i] + (of_b > 0 ? 1 - product / (2 * of_b) : 1) * b[i];
      }
    }
    vectors = std::move(next);
  }
  return vectors[0];
}

std::vector<double> vector_of(int rank, int64_t count) {
  std::vector<double> vector;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) vector.push_back(value(rank, i) - 40);
  return vector;
}

// Of those ranks, by host; what a host has is divided by `divisors`, by host.
std::vector<double> hierarchical_adasum_of(const std::vector<std::vector<int>>& hosts, const std::vector<int>& divisors,
                                           int64_t count) {
  std::vector<std::vector<double>> averages;
  for (size_t host = 0; host < hosts.size(); ++host) {
    std::vector<double> average(static_cast<size_t>(count));
    for (int rank : hosts[host]) {
      const std::vector<double> vector = vector_of(rank, count);
      for (size_t i = 0; i < average.size(); ++i) average[i] += vector[i] / divisors[host];
    }
    averages.push_back(std::move(average));
  }
  return adasum_of(std::move(averages));
}

const std::vector<int64_t> kCounts = {1, 0, 1009, 40009};

// A group of tensors that start as vector_of(rank + shift) and end as `expected` says.
void check_adasum(Job& job, int rank, int shift, int32_t process_set,
                  const std::function<std::vector<double>(int64_t count)>& expected) {
  std::vector<Shape> shapes;
  std::vector<std::vector<float>> data;
  for (int64_t count : kCounts) {
    const std::vector<double> vector = vector_of(rank + shift, count);
    shapes.push_back({count});
    data.emplace_back(vector.begin(), vector.end());
    data.back().reserve(1);  // an address
  }
  auto operation = make("g", HVL_ALLREDUCE, shapes, HVL_ADASUM);
  operation->signature.process_set = process_set;
  std::vector<const char*> inputs;
  std::vector<char*> outputs;
  for (auto& tensor : data) inputs.push_back(reinterpret_cast<char*>(tensor.data()));
  for (auto& tensor : data) outputs.push_back(reinterpret_cast<char*>(tensor.data()));
  CHECK_EQ(job.wait(rank, job.enqueue(rank, operation, inputs, outputs)).message(), "");
  for (size_t t = 0; t < kCounts.size(); ++t) {
    const std::vector<double> result = expected(kCounts[t]);
    size_t num_wrong = 0;
    for (size_t i = 0; i < result.size(); ++i) {
      if (!(std::abs(result[i] - static_cast<double>(data[t][i])) < 1e-3)) ++num_wrong;  // also if it is no number
    }
    CHECK_EQ(num_wrong, size_t{0});
  }
}

TEST(any_number_of_ranks) {
  for (int size : {1, 2, 3, 4, 5, 7}) {
    Job job(size);
    job.on_all([&](int rank) {
      for (int round = 0; round < 3; ++round) {
        check_adasum(job, rank, round, 0, [&](int64_t count) {
          std::vector<std::vector<double>> vectors;
          for (int other = 0; other < size; ++other) vectors.push_back(vector_of(other + round, count));
          return adasum_of(vectors);
        });
      }
    });
  }
}

EngineOptions hierarchical(const std::vector<int>& hosts) {
  EngineOptions options;
  options.hierarchical_adasum = true;
  options.hosts = hosts;
  return options;
}

TEST(hosts_are_averaged_and_their_averages_combined) {
  struct Case {
    std::vector<int> host_of;                // by rank
    std::vector<std::vector<int>> by_hosts;  // in the order of their first ranks
  };
  const std::vector<Case> cases = {
      {{0, 0, 1, 1}, {{0, 1}, {2, 3}}},
      {{0, 0, 1}, {{0, 1}, {2}}},
      {{0, 1, 1}, {{0}, {1, 2}}},
      {{0, 1, 0, 1}, {{0, 2}, {1, 3}}},
      {{0, 1, 1, 2, 0}, {{0, 4}, {1, 2}, {3}}},
      {{0, 1, 2}, {{0}, {1}, {2}}},
      {{}, {{0, 1, 2}}},  // all on one
  };
  for (const Case& each : cases) {
    int size = 0;
    std::vector<int> divisors;
    for (const std::vector<int>& ranks : each.by_hosts) {
      size += static_cast<int>(ranks.size());
      divisors.push_back(static_cast<int>(ranks.size()));
    }
    Job job(size, hierarchical(each.host_of));
    job.on_all([&](int rank) {
      for (int round = 0; round < 2; ++round) {
        check_adasum(job, rank, 0, 0,
                     [&](int64_t count) { return hierarchical_adasum_of(each.by_hosts, divisors, count); });
      }
    });
  }
}

TEST(hosts_of_process_sets) {
  Job job(4, hierarchical({0, 0, 1, 1}));
  job.on_all([&](int rank) {
    for (const std::vector<int64_t>& ranks : {std::vector<int64_t>{0, 1, 3}, std::vector<int64_t>{1, 2}}) {
      auto add = make("add", HVL_ADD_PROCESS_SET, {});
      add->signature.arguments = ranks;
      CHECK_EQ(number_of(job, rank, add), ranks.size() == 3 ? 1 : 2);
    }
    if (rank != 2) {
      check_adasum(job, rank, 0, 1, [](int64_t count) { return hierarchical_adasum_of({{0, 1}, {3}}, {2, 1}, count); });
    }
    if (rank == 1 || rank == 2) {
      check_adasum(job, rank, 0, 2, [](int64_t count) { return hierarchical_adasum_of({{1}, {2}}, {1, 1}, count); });
    }
  });
}

TEST(hosts_without_a_rank_that_has_joined) {
  for (bool counts_joined : {false, true}) {
    EngineOptions options = hierarchical({0, 0, 1, 1});
    options.average_counts_joined = counts_joined;
    Job job(4, options);
    job.on_all([&](int rank) {
      if (rank != 3) {
        check_adasum(job, rank, 0, 0, [&](int64_t count) {
          return hierarchical_adasum_of({{0, 1}, {2}}, {2, counts_joined ? 2 : 1}, count);
        });
      }
      number_of(job, rank, make("join", HVL_JOIN, {}));
    });
  }
}

TEST(only_little_memory_is_kept) {
  LoopbackDataPlane data_plane;
  Adasum adasum;
  const Team team({0}, 0);
  const auto kept_after = [&](size_t count) {
    std::vector<float> data(count, 3.0F);
    Batch batch;
    Reduction reduction;
    reduction.dtype = HVL_FLOAT32;
    reduction.op = HVL_ADASUM;
    char* bytes = reinterpret_cast<char*>(data.data());
    batch.add(bytes, bytes, count * sizeof(float), reduction);
    adasum.begin(batch, team);
    CHECK(adasum.resume(&data_plane).ok());
    CHECK_EQ(data.back(), 3.0F);
    return adasum.kept_bytes();
  };
  const uint64_t kept = kept_after(1000);
  CHECK(kept >= 2 * 1000 * sizeof(float));
  CHECK_EQ(kept_after(10), kept);  // for the next one
  CHECK(kept_after(8 << 20) <= kept);
}

}  // namespace
}  // namespace hvl
