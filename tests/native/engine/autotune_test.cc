// Autotuning: samples, the search on made-up jobs, and a job of engines.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <random>

#include "check.h"
#include "coordinator_driver.h"
#include "job_of_threads.h"
#include "tune/autotuner.h"
#include "tune/sampler.h"
#include "tune/search.h"

namespace hvl {
namespace {

constexpr int64_t kMiB = 1 << 20;

// ---- Samples --------------------------------------------------------------------------------------------------------

struct Steps {
  Sampler sampler;
  uint64_t now = 0;
  Sample sample;
  int num_samples = 0;

  explicit Steps(int steps) : sampler(steps) {}

  bool batch(const std::vector<uint64_t>& tensors, int64_t num_bytes, uint64_t duration) {
    const bool has_ended = sampler.on_batch(tensors, num_bytes, now, &sample);
    now += duration;
    num_samples += has_ended ? 1 : 0;
    return has_ended;
  }
  // Two batches, 12 KiB, `duration` in all.
  bool step(uint64_t duration) {
    const bool has_ended = batch({1, 2}, 4096, duration / 4);
    return batch({3}, 8192, duration - duration / 4) || has_ended;
  }
};

TEST(a_sample_is_some_steps_and_the_step_before_it_is_left_out) {
  Steps steps(3);
  for (uint64_t duration : {900, 10, 20, 30}) CHECK(!steps.step(duration * kMicrosecond));
  CHECK(steps.step(500 * kMicrosecond));  // its first batch ends the sample, and it is the next one left out
  CHECK_EQ(steps.sample.num_bytes, 3 * 12288);
  CHECK_EQ(steps.sample.largest_batch, 8192);
  CHECK_EQ(steps.sample.duration, 60 * kMicrosecond);
  CHECK_EQ(steps.sample.score(), 3 * 12288 / 60.0);
  for (int step = 0; step < 3; ++step) CHECK(!steps.step(40 * kMicrosecond));
  CHECK(steps.step(40 * kMicrosecond));
  CHECK_EQ(steps.sample.duration, 120 * kMicrosecond);
}

TEST(how_a_step_is_cut_into_batches_does_not_matter) {
  Steps steps(2);
  for (int step = 0; step < 30; ++step) {
    if (step % 2 == 0) {
      steps.batch({1, 2, 3}, 12288, 100);
    } else {
      steps.batch({3}, 8192, 20);
      steps.batch({2}, 2048, 20);
      steps.batch({1}, 2048, 60);
    }
  }
  CHECK(steps.num_samples >= 8);
  CHECK(steps.sample.duration >= 160);
  CHECK(steps.sample.duration <= 240);
}

TEST(other_small_collectives_for_a_while_make_one_sample_and_not_many) {
  Steps steps(2);
  for (int step = 0; step < 4; ++step) steps.step(100);
  CHECK_EQ(steps.num_samples, 1);
  for (int validation = 0; validation < 500; ++validation) CHECK(!steps.batch({9}, 4, 10));
  for (int step = 0; step < 4; ++step) steps.step(100);
  CHECK(steps.num_samples <= 3);
}

TEST(names_that_never_come_back_make_no_sample) {
  Steps steps(1);
  for (uint64_t tensor = 0; tensor < 200000; ++tensor) CHECK(!steps.batch({tensor}, 4096, 10));
}

// ---- The search -----------------------------------------------------------------------------------------------------

struct Outcome {
  Tuned best;
  int num_samples = 0;
  std::vector<std::string> reasons;
  double gain = 0;
};

using Speed = std::function<double(const Tuned&)>;  // bytes per microsecond

const uint32_t kSeeds = check::is_brief ? 20 : 100;

// A job that reduces `step_bytes` at a time, in batches as large as the limit allows.
Outcome tune(const SearchOptions& options, int64_t step_bytes, const Speed& speed) {
  Search search(options);
  Outcome outcome;
  while (!search.is_done() && outcome.num_samples < 1000) {
    Sample sample;
    sample.num_bytes = 10 * step_bytes;
    sample.largest_batch = std::min(step_bytes, search.current().fusion_threshold);
    sample.duration = static_cast<uint64_t>(static_cast<double>(sample.num_bytes) * 1000 / speed(search.current()));
    outcome.reasons.push_back(search.on_sample(sample));
    ++outcome.num_samples;
  }
  CHECK(search.is_done());
  CHECK(search.current() == search.best());
  outcome.best = search.best();
  outcome.gain = search.gain();
  return outcome;
}

double distance(int64_t limit, int64_t best) {
  return std::abs(std::log2(static_cast<double>(limit) / static_cast<double>(best)));
}

// The speed varies by up to `noise` of it, and every so often there is a pause.
Speed noisy(Speed speed, double noise, uint32_t seed) {
  auto random = std::make_shared<std::mt19937>(seed);
  return [=](const Tuned& tuned) {
    const double sum = static_cast<double>((*random)() % 1000 + (*random)() % 1000 + (*random)() % 1000) / 1500 - 1;
    return speed(tuned) * (1 + noise * sum) * ((*random)() % 30 == 0 ? 0.2 : 1);
  };
}

TEST(the_best_limit_below_the_start_is_found) {
  for (int64_t best : {kMiB, 4 * kMiB, 16 * kMiB}) {
    const Outcome outcome = tune({}, 100 * kMiB, [&](const Tuned& tuned) {
      return 1000 / (1 + 0.1 * distance(std::min(tuned.fusion_threshold, 100 * kMiB), best));
    });
    CHECK_EQ(outcome.best.fusion_threshold, best);
    CHECK_EQ(outcome.best.cycle_time, 0);
    CHECK(outcome.gain > 1.2);
    CHECK(outcome.num_samples < 60);
  }
}

TEST(a_limit_above_the_start_is_found_where_the_start_cuts_batches) {
  const Speed larger_is_better = [](const Tuned& tuned) {
    return 1000.0 + 50 * std::log2(static_cast<double>(std::min(tuned.fusion_threshold, 100 * kMiB)));
  };
  SearchOptions options;
  options.start.fusion_threshold = 8 * kMiB;
  CHECK_EQ(tune(options, 100 * kMiB, larger_is_better).best.fusion_threshold, 128 * kMiB);
  CHECK_EQ(tune(options, 4 * kMiB, larger_is_better).best.fusion_threshold, 8 * kMiB);
}

TEST(the_cycle_time_is_found) {
  const Outcome outcome =
      tune({}, 10 * kMiB, [](const Tuned& tuned) { return 1000 - 200 * std::abs(tuned.cycle_time * 1000 - 1); });
  CHECK_EQ(outcome.best.cycle_time, 0.001);
  CHECK_EQ(outcome.best.fusion_threshold, SearchOptions().start.fusion_threshold);
}

TEST(both_are_found_although_samples_are_noisy_and_some_have_pauses) {
  uint32_t found = 0;
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    const Speed speed = [](const Tuned& tuned) {
      const double of_limit = 1 + 0.15 * distance(std::min(tuned.fusion_threshold, 100 * kMiB), 4 * kMiB);
      return 1000 / of_limit / (1 + 300 * std::abs(tuned.cycle_time - 0.001));
    };
    const Outcome outcome = tune({}, 100 * kMiB, noisy(speed, 0.05, seed));
    found += outcome.best.fusion_threshold == 4 * kMiB && outcome.best.cycle_time == 0.001 ? 1U : 0U;
    CHECK(speed(outcome.best) >= 0.95 * speed(Tuned()));  // nothing that is worse is ever chosen
  }
  CHECK(found >= kSeeds * 85 / 100);
}

TEST(where_there_is_no_difference_the_start_stays) {
  const Outcome outcome = tune({}, 100 * kMiB, [](const Tuned&) { return 1000; });
  CHECK(outcome.best == Tuned());
  CHECK_EQ(outcome.gain, 1);
  CHECK_EQ(outcome.num_samples, 3 + 3 * 4);  // each candidate loses two comparisons
  int changed = 0;
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    changed += tune({}, 100 * kMiB, noisy([](const Tuned&) { return 1000; }, 0.03, seed)).best == Tuned() ? 0 : 1;
  }
  CHECK(changed <= static_cast<int>(kSeeds * 2 / 100));
}

TEST(a_gain_below_the_margin_is_none) {
  const auto faster_by = [](double factor) {
    return [=](const Tuned& tuned) { return tuned.fusion_threshold < 128 * kMiB ? 1000 * factor : 1000; };
  };
  CHECK(tune({}, 100 * kMiB, faster_by(1.02)).best == Tuned());
  CHECK_EQ(tune({}, 100 * kMiB, faster_by(1.04)).best.fusion_threshold, 16 * kMiB);
}

TEST(what_stays_undecided_is_given_up) {
  SearchOptions options;
  options.cycle_time = false;
  int num_tried = 0;
  const Outcome outcome = tune(options, 32 * kMiB, [&](const Tuned& tuned) {
    return tuned == Tuned() ? 1000 : (++num_tried % 2 == 0 ? 800 : 1200);
  });
  CHECK(outcome.best == Tuned());
  CHECK_EQ(outcome.num_samples, 3 + 2 * 11);
}

TEST(warm_up_does_not_count) {
  int num_samples = 0;
  const Outcome outcome = tune({}, 100 * kMiB, [&](const Tuned& tuned) {
    CHECK(num_samples >= 3 || tuned == Tuned());
    return ++num_samples <= 3 ? 1e6 : 1000 + (tuned.cycle_time > 0 ? 100 : 0);
  });
  CHECK(outcome.best.cycle_time > 0);
  for (size_t sample = 0; sample < 4; ++sample) CHECK_EQ(outcome.reasons[sample] == "warm-up", sample < 3);
}

TEST(what_is_not_tuned_stays) {
  const Speed anything_else_is_better = [](const Tuned& tuned) {
    return 1000 + (tuned.fusion_threshold != 128 * kMiB ? 500 : 0) + (tuned.cycle_time > 0 ? 500 : 0);
  };
  SearchOptions options;
  options.fusion_threshold = false;
  CHECK_EQ(tune(options, 100 * kMiB, anything_else_is_better).best.fusion_threshold, 128 * kMiB);
  options = SearchOptions();
  options.cycle_time = false;
  CHECK_EQ(tune(options, 100 * kMiB, anything_else_is_better).best.cycle_time, 0);
  CHECK_EQ(tune(options, 512 << 10, anything_else_is_better).num_samples,
           4);  // one batch of half a MiB: nothing to try
}

TEST(a_phase_without_gradients_decides_nothing) {
  AutotuneOptions options;
  options.steps_per_sample = 1;
  options.warmup_samples = 1;
  const Tuned start{64 * kMiB, 0};
  Autotuner tuner(options, start);
  uint64_t now = 0;
  const auto step = [&](uint64_t tensor, int64_t num_bytes) { tuner.on_batch({tensor}, num_bytes, now += 1000000); };
  for (int i = 0; i < 1000; ++i) step(1, 4);
  CHECK(!tuner.is_done());
  CHECK(tuner.current() == start);
  for (int i = 0; i < 1000 && tuner.current() == start; ++i) step(2, 16 * kMiB);
  CHECK_EQ(tuner.current().fusion_threshold, 4 * kMiB);  // the first candidate
}

// ---- In a job -------------------------------------------------------------------------------------------------------

TEST(the_coordinator_takes_another_limit_from_the_next_decision_on) {
  CoordinatorDriver driver(2);
  for (const char* name : {"a", "b", "c"}) driver.request_all(allreduce_of(name, {256}));  // 1 KiB each
  driver.decide();
  driver.ready_all({1, 2, 3});
  CHECK_EQ(driver.decide(), "execute 1 2 3");
  driver.coordinator.set_fusion_threshold(2048);
  driver.ready_all({1, 2, 3});
  CHECK_EQ(driver.decide(), "execute 1 2; execute 3");
}

TEST(a_job_is_tuned_and_its_results_stay_the_same) {
  EngineOptions options;
  options.fusion_threshold = 16 * kMiB;
  options.autotune.enabled = true;
  options.autotune.warmup_samples = 1;
  options.autotune.steps_per_sample = 2;
  char folder[] = "/tmp/autotune_test.XXXXXX";
  REQUIRE(mkdtemp(folder) != nullptr);
  options.autotune.log = std::string(folder) + "/log.csv";
  Job job(2, options, 65536);
  constexpr int kSteps = 300;  // more than any search needs
  constexpr size_t kTensors = 3;
  constexpr size_t kElements = 1 << 18;
  job.on_all([&](int rank) {
    std::vector<std::shared_ptr<Operation>> operations;
    for (size_t t = 0; t < kTensors; ++t) {
      operations.push_back(make(std::to_string(t), HVL_ALLREDUCE, {{static_cast<int64_t>(kElements)}}));
    }
    std::vector<std::vector<float>> data(kTensors, std::vector<float>(kElements));
    for (int step = 0; step < kSteps; ++step) {
      std::vector<int64_t> handles;
      for (size_t t = 0; t < kTensors; ++t) {
        for (size_t i = 0; i < kElements; i += 1021) data[t][i] = value(rank, i + t);
        char* memory = reinterpret_cast<char*>(data[t].data());
        handles.push_back(job.enqueue(rank, operations[t], {memory}, {memory}));
      }
      for (int64_t handle : handles) CHECK_EQ(job.wait(rank, handle).message(), "");
      for (size_t t = 0; t < kTensors; ++t) {
        bool is_right = true;
        for (size_t i = 0; i < kElements; i += 1021) is_right &= data[t][i] == value(0, i + t) + value(1, i + t);
        CHECK(is_right);
      }
    }
  });
  std::ifstream file(options.autotune.log);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  REQUIRE(lines.size() >= 4);
  CHECK_EQ(lines[0], "sample,cycle_time_ms,tensor_fusion_threshold,score,reason");
  CHECK_EQ(lines[1].substr(0, 13), "1,0,16777216,");
  CHECK_HAS(lines[1], ",warm-up");
  // Half of a batch of two tensors or of one, whatever was fused.
  CHECK(std::any_of(lines.begin(), lines.end(), [](auto& line) {
    return line.find(",524288,") != std::string::npos || line.find(",262144,") != std::string::npos;
  }));
  CHECK_HAS(lines.back(), ",chosen");
  unlink(options.autotune.log.c_str());
  rmdir(folder);
}

}  // namespace
}  // namespace hvl
