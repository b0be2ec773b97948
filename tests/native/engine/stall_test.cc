// The reports on ranks that others wait for, and on where those are.
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

#include "check.h"
#include "hosts_job.h"
#include "negotiate/coordinator.h"
#include "observe/stack_dump.h"

namespace hvl {
namespace {

Pending waiting(const std::string& name, std::vector<int> ready, std::vector<int> missing, uint64_t since) {
  return Pending{name, HVL_ALLREDUCE, std::move(ready), std::move(missing), since};
}

TEST(a_stall_is_reported_once_per_warning_time_with_all_ranks_that_are_missing) {
  StallInspector inspector(10, 0);
  const std::vector<Pending> pending = {waiting("a", {0}, {1, 3}, kSecond), waiting("b", {0, 3}, {1, 2}, kSecond),
                                        waiting("young", {0}, {4}, 9 * kSecond)};
  CHECK_EQ(inspector.inspect(pending, 10 * kSecond).warning, "");
  const StallVerdict verdict = inspector.inspect(pending, 11 * kSecond);
  CHECK_HAS(verdict.warning, "allreduce of 'a': ready on ranks [0] for 10 s, missing on ranks [1, 3]");
  CHECK(verdict.warning.find("young") == std::string::npos);
  CHECK(verdict.missing == (std::vector<int>{1, 2, 3}));
  CHECK(!verdict.shut_down);
  CHECK_EQ(inspector.inspect(pending, 20 * kSecond).warning, "");
  CHECK(!inspector.inspect(pending, 21 * kSecond).warning.empty());
}

TEST(a_stall_that_lasts_is_reported_in_one_line_at_growing_intervals) {
  StallInspector inspector(10, 0);
  std::vector<Pending> pending = {waiting("a", {0}, {1, 2}, kSecond), waiting("b", {0}, {1, 2}, 2 * kSecond)};
  std::vector<uint64_t> seconds;
  for (uint64_t second = 2; second <= 5400; ++second) {
    const StallVerdict verdict = inspector.inspect(pending, second * kSecond);
    if (verdict.warning.empty()) continue;
    seconds.push_back(second);
    const bool is_whole = verdict.warning.find('\n') != std::string::npos;
    CHECK_EQ(is_whole, seconds.size() == 1);
    CHECK_EQ(verdict.missing.empty(), !is_whole);  // no rank is asked for its stack for one line
    if (!is_whole) CHECK_HAS(verdict.warning, "'a': ready on ranks [0] for " + std::to_string(second - 1) + " s");
  }
  CHECK(seconds == (std::vector<uint64_t>{11, 21, 41, 81, 161, 321, 641, 1281, 2561, 5121}));
  pending[1].missing = {1, 2, 3};
  CHECK_HAS(inspector.inspect(pending, 5401 * kSecond).warning, "\n  allreduce of 'b'");
}

// A loader that takes a little longer than the warning time in each step.
TEST(a_stall_of_each_step_is_reported_as_one) {
  StallInspector inspector(10, 0);
  int num_whole = 0, num_reports = 0;
  for (uint64_t second = 1; second <= 1200; ++second) {
    const std::vector<Pending> pending = {waiting("a", {0}, {1}, second / 12 * 12 * kSecond)};
    const std::vector<Pending> old = second % 12 >= 10 ? pending : std::vector<Pending>();
    const std::string warning = inspector.inspect(old, second * kSecond).warning;
    num_reports += warning.empty() ? 0 : 1;
    num_whole += warning.find('\n') == std::string::npos ? 0 : 1;
  }
  CHECK_EQ(num_whole, 1);
  CHECK(num_reports < 10);
  inspector.inspect({}, 9000 * kSecond);
  CHECK_HAS(inspector.inspect({waiting("a", {0}, {1}, 9000 * kSecond)}, 9010 * kSecond).warning, "\n");
}

TEST(a_report_names_the_usual_cause) {
  const auto report = [](const std::vector<Pending>& pending) {
    return StallInspector(10, 0).inspect(pending, 11 * kSecond).warning;
  };
  const Pending on_0 = waiting("allreduce.noname.8", {0}, {1, 2}, kSecond);
  const Pending on_others = waiting("allreduce.noname.9", {1, 2}, {0}, kSecond);
  CHECK_HAS(report({on_0, on_others}), "Calls without names came in another order on some ranks");
  CHECK_HAS(report({on_0, on_others}), "give them names");
  CHECK_HAS(report({on_0}), "hvd.join()");
  CHECK_HAS(report({on_0, waiting("allreduce.noname.9", {0, 1}, {2}, kSecond)}), "hvd.join()");
  Pending barrier = waiting("barrier.noname", {0}, {1, 2}, kSecond);
  barrier.kind = HVL_BARRIER;
  CHECK_HAS(report({barrier, waiting("a", {1, 2}, {0}, kSecond)}), "fewer barriers");
  CHECK(report({barrier}).find("hvd.join()") == std::string::npos);
}

TEST(a_stall_names_the_process_set_unless_it_has_all_ranks) {
  Coordinator coordinator({4});
  const auto request = [&](int rank, Kind kind, int32_t process_set) {
    Message message;
    message.type = Message::Type::kRequest;
    message.signature.name = name_of(kind);
    message.signature.kind = kind;
    message.signature.process_set = process_set;
    if (kind == HVL_ADD_PROCESS_SET) message.signature.arguments = {0, 2, 3};
    CHECK(coordinator.on_message(rank, message, kSecond).ok());
  };
  for (int rank : {0, 1, 2, 3}) request(rank, HVL_ADD_PROCESS_SET, 0);
  std::vector<Decision> decisions;
  coordinator.decide(&decisions);
  request(3, HVL_BARRIER, 1);
  StallInspector inspector(10, 0);
  StallVerdict verdict = inspector.inspect(coordinator.pending(), 11 * kSecond);
  CHECK_HAS(verdict.warning,
            "barrier of 'barrier' on process set 1 (ranks 0, 2, 3): ready on ranks [3] for 10 s, missing on "
            "ranks [0, 2]");
  CHECK(verdict.missing == (std::vector<int>{0, 2}));
  request(3, HVL_BARRIER, 0);
  verdict = inspector.inspect(coordinator.pending(), 31 * kSecond);
  CHECK_HAS(verdict.warning, "barrier of 'barrier': ready on ranks [3] for 30 s, missing on ranks [0, 1, 2]");
}

TEST(what_is_waited_for_shortly_is_not_looked_at) {
  CHECK_EQ(StallInspector(10, 0).latest_stall(25 * kSecond), 15 * kSecond);
  CHECK_EQ(StallInspector(0, 5).latest_stall(25 * kSecond), 20 * kSecond);
  CHECK_EQ(StallInspector(10, 5).latest_stall(25 * kSecond), 20 * kSecond);
  CHECK_EQ(StallInspector(10, 60).latest_stall(5 * kSecond), 0);
  CHECK_EQ(StallInspector(0, 0).latest_stall(25 * kSecond), 0);
}

TEST(a_stall_that_lasts_too_long_is_over_also_without_a_warning_time) {
  StallInspector inspector(0, 5);
  const std::vector<Pending> pending = {waiting("a", {0}, {1}, kSecond)};
  CHECK(!inspector.is_over(pending, 5 * kSecond));
  CHECK(inspector.is_over(pending, 6 * kSecond));
  CHECK(inspector.inspect(pending, 6 * kSecond).shut_down);
  CHECK(!inspector.is_over({}, 6 * kSecond));
}

std::vector<int> all_ranks(const std::shared_ptr<HostMemory>& memory) {
  std::vector<int> ranks(static_cast<size_t>(memory->shape().ranks));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::shared_ptr<HostMemory> memory_of(int ranks) { return HostMemory::anonymous(HostShape{ranks, 4096, 2}); }

TEST(equal_answers_stand_together_and_who_is_silent_is_named) {
  auto memory = memory_of(4);
  StackDumpRequests questions(memory, {}, all_ranks(memory));
  questions.ask({1, 2, 3}, kSecond);
  for (int rank : {1, 3}) answer(memory.get(), rank, await_question(memory.get(), rank), "here");
  CHECK(!questions.is_over(2 * kSecond));
  CHECK(questions.is_over(kSecond + kAnswerTime));
  const std::string report = questions.report();
  CHECK_HAS(report, "rank 1, rank 3:\nhere\n  rank 2:\n    did not answer within 2 s");
}

TEST(ranks_on_other_hosts_are_waited_for_longer_and_answer_through_their_leaders) {
  StackDumpRequests questions(memory_of(1), {}, {0});
  questions.ask({2, 3}, kSecond);
  questions.take(3, "    there");
  questions.take(4, "    not asked");
  CHECK(!questions.is_over(kSecond + kAnswerTime));
  CHECK(questions.is_over(kSecond + kRemoteAnswerTime));
  const std::string report = questions.report();
  CHECK_HAS(report, "rank 2:\n    did not answer: it is on another host than rank 0");
  CHECK_HAS(report, "rank 3:\n    there");
  CHECK(report.find("not asked") == std::string::npos);
}

TEST(an_answer_to_an_earlier_question_is_none) {
  auto memory = memory_of(2);
  StackDumpRequests questions(memory, {}, all_ranks(memory));
  questions.ask({1}, kSecond);
  const uint32_t first = await_question(memory.get(), 1);
  questions.ask({1}, 60 * kSecond);
  answer(memory.get(), 1, first, "long ago");
  CHECK(!questions.is_over(60 * kSecond));
  answer(memory.get(), 1, await_question(memory.get(), 1), "now");
  CHECK(questions.is_over(60 * kSecond));
  CHECK_HAS(questions.report(), "now");
}

TEST(answers_and_reports_are_cut_to_the_room_there_is) {
  constexpr int kRanks = 9;
  auto memory = memory_of(kRanks);
  StackDumpRequests questions(memory, {}, all_ranks(memory));
  std::vector<int> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.push_back(rank);
  questions.ask(ranks, kSecond);
  for (int rank : ranks) {
    answer(memory.get(), rank, await_question(memory.get(), rank), std::string(100000, static_cast<char>('a' + rank)));
  }
  CHECK(questions.is_over(kSecond));
  const std::string report = questions.report();
  CHECK(report.size() < sizeof(HostHeader::broken_text));
  CHECK_HAS(report, "and 6 more places");
}

TEST(who_leaves_is_asked_no_more) {
  auto memory = memory_of(2);
  std::thread asked([&] { CHECK_EQ(await_question(memory.get(), 1), 0u); });
  stop_answering(memory.get(), 1);
  asked.join();
  CHECK_EQ(await_question(memory.get(), 1), 0u);
}

// The ranks that wait get the report; `missing` does nothing.
void check_report(Job& job, int missing, const std::string& expected) {
  job.on_all([&](int rank) {
    if (rank == missing) return;
    float data = 0;
    const Status status = job.run(rank, make("late", HVL_ALLREDUCE, {{1}}), &data);
    CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(HVL_JOB_BROKEN));
    CHECK_HAS(status.message(), expected);
  });
}

// The second missing rank is the only one of its host, which is two levels below the coordinator's.
TEST(the_error_of_a_stalled_job_says_on_all_ranks_where_the_missing_one_is) {
  for (const auto& [hosts, missing] : {std::pair{std::vector<int>{0, 0, 0}, 1}, {std::vector<int>{0, 1, 2, 3}, 3}}) {
    EngineOptions options = on_hosts(hosts);
    options.stall_warning = 0;
    options.stall_shutdown = 0.5;
    Job job(static_cast<int>(hosts.size()), options);
    std::thread asked([&, rank = missing] {
      HostMemory* memory = job.engine(rank).memory().get();
      const int local_rank = memory->shape().ranks == 1 ? 0 : rank;
      answer(memory, local_rank, await_question(memory, local_rank), "    in waiting_for_data");
    });
    check_report(job, missing, "rank " + std::to_string(missing) + ":\n    in waiting_for_data");
    asked.join();
  }
}

const std::string kMissing1 = "allreduce of 'late': ready on ranks [0, 2, 3] for ";

// Asking takes until the limit is over.
TEST(a_limit_soon_after_a_warning_ends_the_job_with_the_report_on_all_ranks_of_all_hosts) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0, 0}, {0, 0, 1, 1}}) {
    EngineOptions options = on_hosts(hosts);
    options.stall_warning = 0.3;
    options.stall_shutdown = 0.6;
    Job job(4, options);
    check_report(job, 1, kMissing1);
  }
}

TEST(a_coordinator_that_is_late_with_its_report_is_not_taken_for_one_that_is_stuck) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0, 0, 0}, {0, 0, 1, 1}}) {
    EngineOptions options = on_hosts(hosts);
    options.stall_warning = 0;
    options.stall_shutdown = 0.1;
    Job job(4, options);
    // It begins to ask when half a second of the others' patience is left, and asking takes two.
    job.engine(0).fault(HVL_FAULT_IN_NEGOTIATION).arm([] { std::this_thread::sleep_for(std::chrono::seconds(2)); });
    check_report(job, 1, kMissing1);
  }
}

TEST(a_coordinator_that_is_stuck_while_it_asks_is_found_out) {
  EngineOptions options;
  options.stall_warning = 0;
  options.stall_shutdown = 0.1;
  Job job(3, options);
  std::atomic<bool> is_over{false};
  std::thread asked([&] {
    HostMemory* memory = job.engine(1).memory().get();
    await_question(memory, 1);
    const auto trigger = [&] {
      while (!is_over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    job.engine(0).fault(HVL_FAULT_IN_NEGOTIATION).arm(trigger);
    float data = 0;
    job.run(0, make("more", HVL_ALLREDUCE, {{1}}), &data);
  });
  float data = 0;
  const uint64_t begun = now_ns();
  const Status status = job.run(2, make("late", HVL_ALLREDUCE, {{1}}), &data);
  CHECK_HAS(status.message(), "the coordinator, rank 0, has said nothing for ");
  CHECK(now_ns() - begun < 10 * kSecond);
  is_over = true;
  asked.join();
}

TEST(the_error_of_a_broken_job_names_what_was_in_flight_on_each_rank) {
  Job job(2);
  std::vector<float> data(8);
  std::vector<int64_t> handles;
  for (size_t i = 0; i < data.size(); ++i) {
    char* address = reinterpret_cast<char*>(&data[i]);
    handles.push_back(job.enqueue(0, make("t" + std::to_string(i), HVL_ALLREDUCE, {{1}}), {address}, {address}));
  }
  job.engine(0).memory()->break_job("rank 1 is lost");
  const std::string in_flight =
      "rank 1 is lost. In flight here: allreduce of 't0', allreduce of 't1', allreduce of 't2', allreduce of "
      "'t3', allreduce of 't4' and 3 more";
  for (const int64_t handle : handles) CHECK_EQ(job.wait(0, handle).message(), in_flight);
  CHECK_EQ(job.engine(0).job_status().message(), in_flight);
  float more = 0;
  Status status;
  job.enqueue(1, make("t0", HVL_ALLREDUCE, {{1}}), {reinterpret_cast<char*>(&more)}, {reinterpret_cast<char*>(&more)},
              &status);
  if (status.ok()) return;  // it has not heard of it yet
  CHECK_EQ(status.message(), "rank 1 is lost");
}

TEST(who_waits_for_a_rank_that_has_left_hears_the_usual_reasons) {
  Job job(2);
  job.on_all([&](int rank) {
    if (rank == 1) return job.engine(1).shut_down();
    float data = 0;
    char* address = reinterpret_cast<char*>(&data);
    Status status;
    const int64_t handle = job.enqueue(0, make("late", HVL_ALLREDUCE, {{1}}), {address}, {address}, &status);
    if (status.ok()) status = job.wait(0, handle);
    CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(HVL_SHUT_DOWN));
    CHECK_HAS(status.message(), "rank 1 has shut the job down");
    CHECK_HAS(status.message(), "hvd.join()");
    CHECK_HAS(status.message(), "has called fewer barriers (is one inside `if rank() == 0`?)");
    CHECK_HAS(status.message(), "has stopped early by itself (let all ranks decide alike)");
  });
  CHECK(job.engine(1).job_status().message().find("hvd.join()") == std::string::npos);
}

}  // namespace
}  // namespace hvl
