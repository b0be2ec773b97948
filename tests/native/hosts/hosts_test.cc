// Jobs of several hosts: engines of one process that share memory within a host and have sockets between hosts.

#include <cstdlib>
#include <cstring>
#include <numeric>

#include "check.h"
#include "hosts_job.h"

namespace hvl {
namespace {

TEST(allreduce_of_all_sizes) {
  on_all_places(
      [](Job& job) {
        for (size_t count : {0, 1, 17, 1009, 1024, 5003, 20011, 60013}) {
          job.on_all([&](int rank) {
            auto operation = make("t" + std::to_string(count), HVL_ALLREDUCE, {{static_cast<int64_t>(count)}});
            for (int round = 0; round < 2; ++round) {
              std::vector<float> data(count + 1);
              for (size_t i = 0; i < count; ++i) data[i] = value(rank, i) + static_cast<float>(round);
              CHECK_EQ(job.run(rank, operation, data.data()).message(), "");
              for (size_t i = 0; i < count; ++i) {
                float expected = 0;
                for (int other = 0; other < job.size(); ++other)
                  expected += value(other, i) + static_cast<float>(round);
                REQUIRE(data[i] == expected);
              }
            }
          });
        }
      },
      16384);
}

TEST(broadcast_from_every_root) {
  on_all_places([](Job& job) {
    for (int root = 0; root < job.size(); ++root) {
      for (size_t count : {1, 1009, 70001}) {
        job.on_all([&](int rank) {
          const std::string name = "b" + std::to_string(root) + "." + std::to_string(count);
          auto operation = make(name, HVL_BROADCAST, {{static_cast<int64_t>(count)}}, HVL_SUM, root);
          std::vector<float> input(count), output(count, -1.0f);
          for (size_t i = 0; i < count; ++i) input[i] = value(rank, i);
          const int64_t handle = job.enqueue(rank, operation, {reinterpret_cast<char*>(input.data())},
                                             {reinterpret_cast<char*>(output.data())});
          CHECK_EQ(job.wait(rank, handle).message(), "");
          for (size_t i = 0; i < count; ++i) REQUIRE(output[i] == value(root, i));
        });
      }
    }
  });
}

}  // namespace
}  // namespace hvl
