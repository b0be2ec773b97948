// Allreduce over several hosts: every type and operation has the bits of its definition, however it is cut and put
// together, on all ranks and each time.
#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "hosts_job.h"

namespace hvl {
namespace {

constexpr size_t kMost = 5003;  // elements: several chunks of the smallest slots
constexpr size_t kCounts[] = {1, 67, 1009, kMost};

struct Scales {
  double prescale;
  double postscale;
};
constexpr Scales kScales[] = {{1.0, 1.0}, {0.5, -3.0}, {1.0 / 3.0, 1.0}};

struct Case {
  Reduction reduction;
  size_t count;
  std::string name;
};

std::vector<Case> all_cases(int size) {
  std::vector<Case> cases;
  for (int dtype = 0; dtype < kNumDataTypes; ++dtype) {
    for (ReduceOp op : {HVL_AVERAGE, HVL_SUM, HVL_MIN, HVL_MAX, HVL_PRODUCT}) {
      if (why_not_reducible(static_cast<DataType>(dtype), op) != nullptr) continue;
      if (is_left_out(dtype, op)) continue;
      for (const Scales& scales : kScales) {
        const bool is_scaled = scales.prescale != 1.0 || scales.postscale != 1.0;
        if (is_scaled && (dtype == HVL_BOOL || (op != HVL_SUM && op != HVL_AVERAGE))) continue;
        for (size_t count : kCounts) {
          Case each;
          each.reduction.dtype = static_cast<DataType>(dtype);
          each.reduction.op = op;
          each.reduction.prescale = scales.prescale;
          each.reduction.postscale = scales.postscale;
          each.reduction.divisor = op == HVL_AVERAGE ? size : 1;
          each.count = count;
          each.name = std::string(name_of(each.reduction.dtype)) + " " + name_of(op) + " " + std::to_string(count) +
                      " " + std::to_string(scales.prescale) + " " + std::to_string(scales.postscale);
          cases.push_back(each);
        }
      }
    }
  }
  return cases;
}

// The input of each rank for each type: [dtype][rank].
std::array<std::vector<Bytes>, kNumDataTypes> all_inputs(int size) {
  std::array<std::vector<Bytes>, kNumDataTypes> inputs;
  for (int dtype = 0; dtype < kNumDataTypes; ++dtype) {
    for (int rank = 0; rank < size; ++rank) {
      inputs[static_cast<size_t>(dtype)].push_back(
          random_array(static_cast<DataType>(dtype), kMost, static_cast<unsigned>(100 * dtype + rank)));
    }
  }
  return inputs;
}

// How batches are formed and cut.
struct Cut {
  int64_t slot_bytes;
  int64_t fusion_threshold;
};
constexpr Cut kCuts[] = {{4096, 1}, {4096, 20000}, {65536, 128 << 20}, {16384, 128 << 20}};

TEST(every_type_and_operation_has_the_bits_of_its_definition) {
  size_t brief_cut = 0;
  for (const std::vector<int>& hosts : kPlaces) {
    brief_cut = (brief_cut + 1) % std::size(kCuts);
    const int size = static_cast<int>(hosts.size());
    const std::vector<Case> cases = all_cases(size);
    const auto inputs = all_inputs(size);
    std::vector<Bytes> expected;
    for (const Case& each : cases) {
      std::vector<const char*> sources;
      for (const Bytes& input : inputs[each.reduction.dtype]) sources.push_back(input.data());
      expected.push_back(reduced(each.reduction, sources, hosts, each.count));
    }
    for (size_t cut = 0; cut < std::size(kCuts); ++cut) {
      if (check::is_brief && cut != brief_cut) continue;
      EngineOptions options = on_hosts(hosts);
      options.fusion_threshold = kCuts[cut].fusion_threshold;
      options.overlap = cut != 2;  // where nothing is sent before a rank waits, batches are as long as they may be
      Wiring wiring;
      wiring.seals_data = cut % 2 == 1;
      Job job(size, options, kCuts[cut].slot_bytes, 4, wiring);
      if (cut == 1) job.become_impatient(20 * kMicrosecond);
      for (int round = 0; round < 2; ++round) {
        job.on_all([&](int rank) {
          std::vector<Bytes> results;
          std::vector<int64_t> handles;
          for (const Case& each : cases) {
            results.emplace_back(each.count * size_of(each.reduction.dtype) + 1);
            const char* input = inputs[each.reduction.dtype][static_cast<size_t>(rank)].data();
            handles.push_back(
                job.enqueue(rank, make_of(each.name, HVL_ALLREDUCE, each.reduction, {static_cast<int64_t>(each.count)}),
                            {input}, {results.back().data()}));
          }
          for (size_t i = 0; i < cases.size(); ++i) {
            CHECK_EQ(job.wait(rank, handles[i]).message(), "");
            if (results[i] != expected[i]) CHECK_EQ("wrong on rank " + std::to_string(rank), cases[i].name);
          }
        });
      }
    }
  }
}

// The loss by rounding sums of hosts to the type is small.
TEST(half_precision_is_as_exact_as_its_type) {
  struct Kind {
    DataType dtype;
    double epsilon;
  };
  const Kind kinds[] = {
      {HVL_FLOAT16, 1.0 / 1024}, {HVL_BFLOAT16, 1.0 / 128}, {HVL_FLOAT8_E4M3FN, 1.0 / 8}, {HVL_FLOAT8_E5M2, 1.0 / 4}};
  for (const std::vector<int>& hosts : kPlaces) {
    const int size = static_cast<int>(hosts.size());
    Job job(size, on_hosts(hosts));
    for (const Kind& kind : kinds) {
      std::vector<Bytes> inputs;
      for (int rank = 0; rank < size; ++rank) {
        inputs.push_back(random_array(kind.dtype, kMost, static_cast<unsigned>(rank)));
      }
      const auto number = [&](const Bytes& array, size_t i) {
        return with_type(kind.dtype, [&](auto element) {
          std::memcpy(&element, array.data() + i * sizeof element, sizeof element);
          return static_cast<double>(widen(element));
        });
      };
      job.on_all([&](int rank) {
        Reduction average;
        average.dtype = kind.dtype;
        average.op = HVL_AVERAGE;
        Bytes data = inputs[static_cast<size_t>(rank)];
        const auto operation = make_of(name_of(kind.dtype), HVL_ALLREDUCE, average, {static_cast<int64_t>(kMost)});
        CHECK_EQ(job.run(rank, operation, data.data()).message(), "");
        size_t num_wrong = 0;
        for (size_t i = 0; i < kMost; ++i) {
          double exact = 0;
          for (const Bytes& input : inputs) exact += number(input, i) / size;
          // Of numbers up to 1, each of the sums of hosts is rounded, and the result.
          if (!(std::abs(number(data, i) - exact) <= 2 * kind.epsilon)) ++num_wrong;
        }
        CHECK_EQ(num_wrong, size_t{0});
      });
    }
  }
}

TEST(an_average_of_float16_is_in_range_though_the_sum_is_not) {
  for (const std::vector<int>& hosts : kPlaces) {
    const int size = static_cast<int>(hosts.size());
    Job job(size, on_hosts(hosts));
    for (size_t count : {size_t{9}, size_t{20000}}) {
      for (Kind kind : {HVL_ALLREDUCE, HVL_REDUCESCATTER}) {
        const size_t total = count * static_cast<size_t>(size);
        job.on_all([&](int rank) {
          const std::vector<uint16_t> data(total, narrow<Float16>(60000.0f).bits);
          std::vector<uint16_t> result(total);
          Reduction average;
          average.dtype = HVL_FLOAT16;
          average.op = HVL_AVERAGE;
          const auto operation = make_of("x", kind, average, {static_cast<int64_t>(total)});
          const int64_t handle = job.enqueue(rank, operation, {reinterpret_cast<const char*>(data.data())},
                                             {reinterpret_cast<char*>(result.data())});
          CHECK_EQ(job.wait(rank, handle).message(), "");
          const size_t mine = kind == HVL_ALLREDUCE ? total : count;
          CHECK_EQ(
              static_cast<size_t>(std::count(result.begin(), result.begin() + static_cast<int64_t>(mine), data[0])),
              mine);
        });
      }
    }
  }
}

TEST(many_tensors_in_different_orders) {
  constexpr int kTensors = 100;
  for (const std::vector<int>& hosts : kPlaces) {
    const int size = static_cast<int>(hosts.size());
    EngineOptions options = on_hosts(hosts);
    options.fusion_threshold = 20000;
    options.cache_capacity = 50;
    Job job(size, options);
    job.become_impatient(100 * kMicrosecond);
    job.on_all([&](int rank) {
      std::mt19937 random(static_cast<unsigned>(rank) + 1);
      for (int round = 0; round < 2; ++round) {
        std::vector<int> order;
        for (int t = 0; t < kTensors; ++t) order.push_back(t);
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::vector<float>> data(kTensors);
        std::vector<int64_t> handles(kTensors);
        for (int t : order) {
          auto& tensor = data[static_cast<size_t>(t)];
          tensor.assign(static_cast<size_t>(t * 11 + 1), static_cast<float>(rank + t));
          auto operation = make("t" + std::to_string(t), HVL_ALLREDUCE, {{t * 11 + 1}});
          char* address = reinterpret_cast<char*>(tensor.data());
          handles[static_cast<size_t>(t)] = job.enqueue(rank, operation, {address}, {address});
        }
        for (int t : order) CHECK_EQ(job.wait(rank, handles[static_cast<size_t>(t)]).message(), "");
        for (int t = 0; t < kTensors; ++t) {
          const float expected = static_cast<float>(size * t + size * (size - 1) / 2);
          const auto& tensor = data[static_cast<size_t>(t)];
          CHECK_EQ(std::count(tensor.begin(), tensor.end(), expected), t * 11 + 1);
        }
      }
    });
  }
}

}  // namespace
}  // namespace hvl
