// Jobs of two hosts with an attacker on the data connection that changes bytes: if it is sealed, no changed data is
// used.
#include <string>
#include <vector>

#include "check.h"
#include "hosts_job.h"
#include "teams.h"
#include "wiretap.h"

namespace hvl {
namespace {

struct Outcome {
  Status status;
  bool has_wrong_result = false;  // of a collective that succeeded
};

// A few allreduces and broadcasts of that many numbers, of which one byte is changed on its way to rank 1; by rank.
std::vector<Outcome> run_with_change(bool seals, uint64_t changed, int64_t count) {
  std::vector<Outcome> outcomes(2);
  Wiretap tap([&](uint64_t position, char byte) { return position == changed ? static_cast<char>(byte ^ 64) : byte; });
  Wiring wiring;
  wiring.seals_data = seals;
  wiring.data_ends = [&](int* ends) { tap.make_ends(ends); };
  Job job(2, on_hosts({0, 1}), 4096, 4, wiring);
  job.on_all([&](int rank) {
    Outcome& outcome = outcomes[static_cast<size_t>(rank)];
    for (int round = 0; round < 4 && outcome.status.ok(); ++round) {
      std::vector<float> data(static_cast<size_t>(count));
      for (size_t i = 0; i < data.size(); ++i) data[i] = value(rank, i);
      const Kind kind = round % 2 == 0 ? HVL_ALLREDUCE : HVL_BROADCAST;
      outcome.status = job.run(rank, make(std::to_string(kind), kind, {{count}}, HVL_SUM, 0), data.data());
      if (!outcome.status.ok()) break;
      for (size_t i = 0; i < data.size(); ++i) {
        const float expected = kind == HVL_ALLREDUCE ? value(0, i) + value(1, i) : value(0, i);
        outcome.has_wrong_result |= data[i] != expected;
      }
    }
  });
  return outcomes;
}

// The changed byte, and the number of elements of each collective: small ones, and in large ones the first frame, a
// later one and the gather step.
const std::vector<std::pair<uint64_t, int64_t>> kChanges = {
    {0, 5}, {3, 5}, {10, 5}, {20, 5}, {50, 5}, {100, 5}, {40, 100000}, {70001, 100000}, {300000, 100000},
};

TEST(without_seals_a_changed_byte_is_used) {
  size_t num_wrong = 0;
  for (const auto& [position, count] : {std::pair<uint64_t, int64_t>{3, 5}, {70003, 100000}}) {
    const std::vector<Outcome> outcomes = run_with_change(false, position, count);
    for (const Outcome& outcome : outcomes) CHECK_EQ(outcome.status.message(), "");
    num_wrong += outcomes[1].has_wrong_result ? 1 : 0;
  }
  CHECK_EQ(num_wrong, size_t{2});
}

TEST(with_seals_a_changed_byte_breaks_the_job_and_is_never_used) {
  for (const auto& [position, count] : kChanges) {
    for (const Outcome& outcome : run_with_change(true, position, count)) {
      CHECK(!outcome.has_wrong_result);
      CHECK_EQ(outcome.status.code(), HVL_JOB_BROKEN);
      CHECK_HAS(outcome.status.message(), "the MAC of data frame ");
      CHECK_HAS(outcome.status.message(), "from rank 0 on host a is wrong: it was changed on the way");
    }
  }
}

TEST(seals_change_no_result) {
  for (const Outcome& outcome : run_with_change(true, UINT64_MAX, 100000)) {
    CHECK_EQ(outcome.status.message(), "");
    CHECK(!outcome.has_wrong_result);
  }
}

}  // namespace
}  // namespace hvl
