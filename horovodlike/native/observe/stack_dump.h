// Stack dumps: the leader of a host asks for the stacks of the Python threads of its ranks by a request in shared
// memory. A Python thread of the rank, which sleeps until there is one, writes the answer next to it. The leader polls
// for the answer and never blocks. The coordinator receives the answers of other hosts from their leaders.
//
// The engine of the asked rank takes no part, and no signal is sent: a signal would interrupt system calls of code that
// does not expect it. The price: a rank that holds the interpreter's lock in native code does not answer, and the
// report says so.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "shm/host_memory.h"

namespace hvl {

// The time that a rank has to answer. It needs milliseconds, unless it is stuck in native code.
constexpr uint64_t kAnswerTime = 2 * kSecond;
constexpr uint64_t kRemoteAnswerTime = 2 * kAnswerTime;  // for a rank on another host

// Any thread of the asked rank: sleeps until there is a stack-dump request, and returns its number. Returns 0 if the
// rank leaves, so that there will be no more.
uint32_t await_question(HostMemory* memory, int local_rank);
// Answers the request with the number `question`; `text` is truncated to HVL_STACK_BYTES.
void answer(HostMemory* memory, int local_rank, uint32_t question, const std::string& text);
// Makes await_question() return 0 from now on, also a call under way.
void stop_answering(HostMemory* memory, int local_rank);

// A leader's side: one round of requests to some ranks at a time.
class StackDumpRequests {
 public:
  struct Question {
    int rank = 0;
    int local_rank = -1;  // -1: it is on another host
    uint32_t number = 0;
    std::string text = {};  // the answer from another host; empty: none yet
  };

  // `pids` by local rank; empty: the ranks are threads of this process. `ranks`: this host's ranks, by local rank,
  // ascending; take() is for ranks on other hosts.
  StackDumpRequests(std::shared_ptr<HostMemory> memory, std::vector<int> pids, std::vector<int> ranks);

  void ask(const std::vector<int>& ranks, uint64_t now);
  // True if all asked ranks have answered, or their time is over.
  bool is_over(uint64_t now);
  // Returns the answers as text; ranks with equal answers are listed together.
  std::string report();
  const std::vector<Question>& questions() const { return questions_; }
  std::string answer_of(const Question& question);
  // Takes the answer of a rank on another host.
  void take(int rank, const std::string& text);

 private:
  bool has_answered(const Question& question);
  std::string name_of(const Question& question) const;
  std::string why_silent(const Question& question) const;

  std::shared_ptr<HostMemory> memory_;
  std::vector<int> pids_;
  std::vector<int> ranks_;
  std::vector<Question> questions_;
  uint64_t asked_at_ = 0;
};

}  // namespace hvl
