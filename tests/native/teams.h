// Process sets of a job of threads, and sums over their members.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "job_of_threads.h"

namespace hvl {

inline int64_t number_of(Job& job, int rank, const std::shared_ptr<Operation>& operation) {
  std::vector<hvl_output> outputs;
  CHECK_EQ(job.wait(rank, job.enqueue(rank, operation, {}, {}), &outputs).message(), "");
  REQUIRE(outputs.size() == 1);
  int64_t number = 0;
  memcpy(&number, outputs[0].data, sizeof number);
  free(outputs[0].data);
  return number;
}

inline std::shared_ptr<Operation> add_of(const std::vector<int64_t>& ranks) {
  auto operation = make("add", HVL_ADD_PROCESS_SET, {});
  operation->signature.arguments = ranks;
  return operation;
}

inline std::shared_ptr<Operation> on_set(int64_t process_set, std::shared_ptr<Operation> operation) {
  operation->signature.process_set = static_cast<int32_t>(process_set);
  return operation;
}

inline bool contains(const std::vector<int64_t>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

inline void check_sum(Job& job, int rank, int64_t set, const std::vector<int64_t>& ranks, size_t count, int round) {
  std::vector<float> data(count + 1);
  for (size_t i = 0; i < count; ++i) data[i] = value(rank, i) + static_cast<float>(round);
  auto operation = on_set(set, make("sum", HVL_ALLREDUCE, {{static_cast<int64_t>(count)}}));
  CHECK_EQ(job.run(rank, operation, data.data()).message(), "");
  size_t num_wrong = 0;
  for (size_t i = 0; i < count; ++i) {
    float expected = 0;
    for (int64_t other : ranks) expected += value(static_cast<int>(other), i) + static_cast<float>(round);
    num_wrong += data[i] == expected ? 0 : 1;
  }
  CHECK_EQ(num_wrong, size_t{0});
}

}  // namespace hvl
