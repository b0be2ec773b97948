#include "observe/stack_dump.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "sync/waiter.h"

namespace hvl {

namespace {

constexpr uint32_t kLeaves = 1u << 31;  // a bit of StackBlock::asked: the rank leaves
constexpr size_t kMaxReport = 24 << 10;
constexpr uint64_t kLongSleep = 3600 * kSecond;

}  // namespace

uint32_t await_question(HostMemory* memory, int local_rank) {
  StackBlock& block = memory->stacks(local_rank);
  for (;;) {
    const uint32_t asked = block.asked.load();
    if ((asked & kLeaves) != 0) return 0;
    if (asked != block.answered.load()) return asked;
    futex_wait(&block.asked, asked, kLongSleep, FutexScope::kHost);
  }
}

void answer(HostMemory* memory, int local_rank, uint32_t question, const std::string& text) {
  StackBlock& block = memory->stacks(local_rank);
  const size_t length = std::min(text.size(), sizeof block.text);
  memcpy(block.text, text.data(), length);
  block.length = static_cast<uint32_t>(length);
  block.answered.store(question);
}

void stop_answering(HostMemory* memory, int local_rank) {
  StackBlock& block = memory->stacks(local_rank);
  block.asked.fetch_or(kLeaves);
  futex_wake(&block.asked, INT_MAX, FutexScope::kHost);
}

StackDumpRequests::StackDumpRequests(std::shared_ptr<HostMemory> memory, std::vector<int> pids, std::vector<int> ranks)
    : memory_(std::move(memory)), pids_(std::move(pids)), ranks_(std::move(ranks)) {}

void StackDumpRequests::ask(const std::vector<int>& ranks, uint64_t now) {
  questions_.clear();
  for (int rank : ranks) {
    Question question;
    question.rank = rank;
    const auto here = std::lower_bound(ranks_.begin(), ranks_.end(), rank);
    if (here != ranks_.end() && *here == rank) {
      question.local_rank = static_cast<int>(here - ranks_.begin());
      StackBlock& block = memory_->stacks(question.local_rank);
      question.number = block.asked.fetch_add(1) + 1;
      futex_wake(&block.asked, INT_MAX, FutexScope::kHost);
    }
    questions_.push_back(question);
  }
  asked_at_ = now;
}

bool StackDumpRequests::has_answered(const Question& question) {
  if (question.local_rank == -1) return !question.text.empty();
  return memory_->stacks(question.local_rank).answered.load() == question.number;
}

void StackDumpRequests::take(int rank, const std::string& text) {
  for (Question& each : questions_) {
    if (each.rank == rank) each.text = text;
  }
}

bool StackDumpRequests::is_over(uint64_t now) {
  return std::all_of(questions_.begin(), questions_.end(), [&](const Question& each) {
    return now - asked_at_ >= (each.local_rank == -1 ? kRemoteAnswerTime : kAnswerTime) || has_answered(each);
  });
}

std::string StackDumpRequests::answer_of(const Question& question) {
  if (!has_answered(question)) return "    " + why_silent(question);
  if (question.local_rank == -1) return question.text;
  const StackBlock& block = memory_->stacks(question.local_rank);
  return std::string(block.text, std::min<size_t>(block.length, sizeof block.text));
}

std::string StackDumpRequests::report() {
  std::vector<std::pair<std::string, std::string>> answers;  // the ranks, and their answer
  for (const Question& question : questions_) {
    const std::string text = answer_of(question);
    const auto same =
        std::find_if(answers.begin(), answers.end(), [&](const auto& each) { return each.second == text; });
    if (same == answers.end()) {
      answers.emplace_back(name_of(question), text);
    } else {
      same->first += ", " + name_of(question);
    }
  }
  std::string report = "Where the missing ranks are, innermost call last:";
  size_t num_said = 0;
  for (const auto& [who, text] : answers) {
    if (report.size() + who.size() + text.size() > kMaxReport) break;
    report += "\n  " + who + ":\n" + text;
    ++num_said;
  }
  if (num_said < answers.size()) report += "\n  and " + std::to_string(answers.size() - num_said) + " more places";
  return report;
}

std::string StackDumpRequests::name_of(const Question& question) const {
  const size_t index = static_cast<size_t>(question.local_rank);  // out of range if it is on another host
  return "rank " + std::to_string(question.rank) +
         (index < pids_.size() ? " (pid " + std::to_string(pids_[index]) + ")" : "");
}

std::string StackDumpRequests::why_silent(const Question& question) const {
  if (question.local_rank == -1) {
    return "did not answer: it is on another host than rank 0. If the first rank of its host, or of a host between, is "
           "stopped, this one may not be missing";
  }
  const std::string text = "did not answer within " + std::to_string(kAnswerTime / kSecond) + " s: ";
  const size_t index = static_cast<size_t>(question.local_rank);
  switch (index < pids_.size() ? state_of(pids_[index]) : '?') {
    case 'T':
    case 't': return text + "its process is stopped, by a signal or a debugger";
    case 'D': return text + "it waits for a device or a file system, in the kernel";
    default: return text + "it may be in native code that holds the interpreter's lock";
  }
}

}  // namespace hvl
