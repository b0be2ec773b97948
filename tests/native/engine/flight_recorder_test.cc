// The last collectives, and how late ranks are.
#include "observe/flight_recorder.h"

#include <atomic>
#include <set>
#include <thread>

#include "check.h"
#include "job_of_threads.h"
#include "negotiate/coordinator.h"
#include "observe/time_shares.h"

namespace hvl {
namespace {

CollectiveRecord flight_of(uint64_t number) {
  CollectiveRecord record;
  record.number = record.enqueued_at = record.begun_at = number;
  record.num_bytes = static_cast<int64_t>(number);
  record.set_name("tensor " + std::to_string(number));
  return record;
}

TEST(the_last_ones_are_kept) {
  FlightRecorder recorder(3);
  CHECK(recorder.read().empty());
  for (uint64_t number = 1; number <= 5; ++number) {
    recorder.begin(flight_of(number));
    if (number < 5) recorder.end(number + 100);
  }
  const std::vector<CollectiveRecord> records = recorder.read();
  REQUIRE(records.size() == 3);
  CHECK_EQ(records[0].number, 3u);
  CHECK_EQ(records[1].ended_at, 104u);
  CHECK_EQ(records[2].ended_at, 0u);
  CHECK_EQ(std::string(records[2].name), "tensor 5");
}

TEST(two_ranks_that_read_at_different_moments_have_samples_in_common) {
  FlightRecorder early(256), late(256);
  FlightRecorder* both[2] = {&early, &late};
  std::set<uint64_t> found[2];
  uint64_t last[2] = {0, 0};
  uint64_t now = 1;
  for (uint64_t number = 1; number <= 40000; ++number) {
    const bool is_step = number % 1000 == 0;
    now += is_step ? 30 * kMillisecond : kMillisecond / 10;
    for (int rank = 0; rank < 2; ++rank) {
      CollectiveRecord record = flight_of(number);
      record.begun_at = now;
      both[rank]->begin(record);
      both[rank]->end(now + 10);
      if (number % 10000 != (rank == 0 ? 1 : 5000)) continue;
      const std::vector<CollectiveRecord> sample = both[rank]->sample(&last[rank], 32);
      CHECK_EQ(last[rank], number);
      CHECK(sample.size() <= 32 && (number == 1 || sample.size() > 10));
      for (const CollectiveRecord& each : sample) found[rank].insert(each.number);
    }
  }
  for (uint64_t number = 1000; number <= 30000; number += 1000)
    CHECK(found[0].count(number) + found[1].count(number) == 2);
}

TEST(a_sample_holds_all_that_came_if_these_are_few) {
  FlightRecorder recorder(256);
  uint64_t after = 0;
  CHECK(recorder.sample(&after, 32).empty());
  for (uint64_t number = 1; number <= 300; ++number) recorder.begin(flight_of(number));
  after = 280;
  const std::vector<CollectiveRecord> sample = recorder.sample(&after, 32);
  CHECK_EQ(sample.size(), 20u);
  CHECK_EQ(sample.front().number, 281u);
  CHECK_EQ(after, 300u);
  CHECK(recorder.sample(&after, 32).empty());
}

TEST(the_time_of_a_rank_is_shared_between_waiting_and_communicating) {
  TimeShares time;
  CHECK_EQ(time.read(1000).waiting, 0);
  time.enqueue(1000);
  CHECK_EQ(time.read(1300).waiting, 300);  // it still waits
  time.enqueue(1200);
  time.begin(1500);
  CHECK_EQ(time.read(1700).waiting, 500);
  CHECK_EQ(time.read(1700).communicating, 200);
  time.complete();
  time.end(1800);
  CHECK_EQ(time.read(1900).waiting, 600);  // the other one
  time.begin(1750);                        // read together with the first
  time.complete();
  time.end(2000);
  CHECK_EQ(time.read(5000).waiting, 600);  // not less than what was shown
  CHECK_EQ(time.read(5000).communicating, 500);
  time.enqueue(6000);
  time.withdraw();
  CHECK_EQ(time.read(9000).waiting, 600);
}

TEST(a_reader_sees_whole_records_while_they_are_written) {
  FlightRecorder recorder(4);
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done) {
      for (const CollectiveRecord& record : recorder.read()) {
        CHECK_EQ(record.num_bytes, static_cast<int64_t>(record.number));
        CHECK_EQ(std::string(record.name), "tensor " + std::to_string(record.number));
      }
    }
  });
  for (uint64_t number = 1; number <= 20000; ++number) {
    recorder.begin(flight_of(number));
    recorder.end(number + 1);
  }
  done = true;
  reader.join();
}

TEST(a_name_is_cut_between_characters_and_quoted) {
  CollectiveRecord record;
  record.set_name(std::string(66, 'a') + "\xc3\xa4");  // a letter of two bytes, of which one would fit
  CHECK_EQ(std::string(record.name), std::string(66, 'a'));
  record.set_name("a\"b\\c\n");
  CHECK_HAS(to_json({record}), R"("name": "a\"b\\c\u000a")");
}

TEST(moments_in_which_several_tensors_are_waited_for_count_once) {
  StragglerStats stats;
  stats.add(10 * kSecond, 12 * kSecond);
  stats.add(11 * kSecond, 12 * kSecond);
  stats.add(11 * kSecond, 13 * kSecond);
  CHECK_EQ(stats.waited, 3 * kSecond);
  CHECK_EQ(stats.times, 2);
  stats.add(20 * kSecond, 20 * kSecond + kLate - 1);
  CHECK_EQ(stats.times, 2);
  stats.add(21 * kSecond, 19 * kSecond);
  CHECK_EQ(stats.waited, 3 * kSecond + kLate - 1);
}

TEST(the_last_rank_is_the_one_that_was_ready_last_not_the_one_that_was_heard_last) {
  CoordinatorOptions options;
  options.size = 3;
  Coordinator coordinator(options);
  Message message;
  message.type = Message::Type::kRequest;
  message.signature = make("a", HVL_ALLREDUCE, {{1}})->signature;
  CHECK(coordinator.on_message(0, message, 5 * kSecond).ok());
  CHECK(coordinator.on_message(2, message, 2 * kSecond).ok());
  CHECK_EQ(coordinator.pending()[0].since, 2 * kSecond);
  CHECK(coordinator.on_message(1, message, 3 * kSecond).ok());
  CHECK_EQ(coordinator.straggler_stats()[0].waited, 3 * kSecond);
  CHECK_EQ(coordinator.straggler_stats()[0].times, 1);
  CHECK_EQ(coordinator.straggler_stats()[1].times, 0);
  CHECK_EQ(coordinator.straggler_stats()[2].times, 0);
}

TEST(engines_record_the_same_collectives_and_count_their_time) {
  Job job(3);
  job.on_all([&](int rank) {
    const auto operation = make("a", HVL_ALLREDUCE, {{1000}});
    std::vector<float> data(1000, 1.0f);
    for (int round = 0; round < 10; ++round) CHECK(job.run(rank, operation, data.data()).ok());
  });
  for (int rank = 0; rank < 3; ++rank) {
    const Engine& engine = job.engine(rank);
    const std::vector<CollectiveRecord> records = engine.flight_recorder().read();
    REQUIRE(records.size() == 10);
    CHECK_EQ(records[9].number, 10u);
    CHECK_EQ(records[0].num_bytes, 4000);
    CHECK_EQ(engine.counters().executed.load(), 10);
    int64_t negotiated = 0;
    for (const CollectiveRecord& record : records)
      negotiated += static_cast<int64_t>(record.begun_at - record.enqueued_at);
    CHECK_EQ(engine.counters().negotiation_time.load(), negotiated);
    CHECK(engine.counters().execution_time.load() > 0);
    const TimeShares::Sums spent = job.engine(rank).counters().time.read(now_ns());
    CHECK(spent.communicating > 0 && spent.communicating <= engine.counters().execution_time.load());
    CHECK_EQ(job.engine(rank).counters().time.read(now_ns() + kSecond).waiting, spent.waiting);
    CHECK(static_cast<int64_t>(engine.waited_for_peers()) <= engine.counters().execution_time.load());
  }
}

}  // namespace
}  // namespace hvl
