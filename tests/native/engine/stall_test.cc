// What is said of ranks that others wait for, and where those are.
#include <atomic>
#include <numeric>
#include <thread>

#include "check.h"
#include "job_of_threads.h"
#include "watch/stacks.h"
#include "watch/stall_inspector.h"

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
  StackQuestions questions(memory, {}, all_ranks(memory));
  questions.ask({1, 2, 3}, kSecond);
  for (int rank : {1, 3}) answer(memory.get(), rank, await_question(memory.get(), rank), "here");
  CHECK(!questions.is_over(2 * kSecond));
  CHECK(questions.is_over(kSecond + kAnswerTime));
  const std::string report = questions.report();
  CHECK_HAS(report, "rank 1, rank 3:\nhere\n  rank 2:\n    did not answer within 2 s");
}

TEST(who_passes_on_what_others_ask_for_may_hide_them) {
  // Ranks 0 and 1 are on the coordinator's host, 2 and 3 on another one, 4 and 5 on one below that.
  const std::vector<std::vector<int>> relays = {{}, {}, {}, {2}, {2}, {4, 2}};
  const std::string elsewhere = "was not asked: it is on another host than rank 0";
  const auto hidden_by = [&](const std::string& rank) {
    return elsewhere + ", and what it asks for comes through rank " + rank +
           ": if that one is stopped, this one may not be missing";
  };
  StackQuestions questions(memory_of(2), {}, {0, 1}, relays);
  questions.ask({2, 3, 4, 5}, kSecond);
  CHECK_HAS(questions.report(), "rank 2:\n    " + elsewhere + "\n  rank 3, rank 4, rank 5:\n    " + hidden_by("2"));
  questions.ask({4, 5}, kSecond);
  CHECK_HAS(questions.report(), "rank 4:\n    " + elsewhere + "\n  rank 5:\n    " + hidden_by("4"));
  questions.ask({3, 5}, kSecond);
  CHECK_HAS(questions.report(), "rank 3, rank 5:\n    " + elsewhere);
  CHECK(questions.report().find("comes through") == std::string::npos);
}

TEST(an_answer_to_an_earlier_question_is_none) {
  auto memory = memory_of(2);
  StackQuestions questions(memory, {}, all_ranks(memory));
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
  StackQuestions questions(memory, {}, all_ranks(memory));
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

TEST(the_error_of_a_stalled_job_says_on_all_ranks_where_the_missing_one_is) {
  EngineOptions options;
  options.stall_warning = 0;
  options.stall_shutdown = 0.5;
  Job job(3, options);
  std::thread asked([&] {
    HostMemory* memory = job.engine(1).memory().get();
    answer(memory, 1, await_question(memory, 1), "    in waiting_for_data");
  });
  job.on_all([&](int rank) {
    if (rank == 1) return;
    float data = 0;
    const Status status = job.run(rank, make("late", HVL_ALLREDUCE, {{1}}), &data);
    CHECK_EQ(static_cast<int>(status.code()), static_cast<int>(HVL_JOB_BROKEN));
    CHECK_HAS(status.message(), "'late'");
    CHECK_HAS(status.message(), "rank 1:\n    in waiting_for_data");
  });
  asked.join();
}

}  // namespace
}  // namespace hvl
