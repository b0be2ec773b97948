// Stack dumps: the coordinator gets the stacks of the Python threads of another rank on its host. It makes a request in
// shared memory. A Python thread of that rank, which sleeps until there is one, writes the answer next to it. The
// coordinator polls for the answer and never blocks.
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

// Any thread of the asked rank: sleeps until there is a stack-dump request, and returns its number. Returns 0 if the
// rank leaves, so that there will be no more.
uint32_t await_question(HostMemory* memory, int local_rank);
// Answers the request with the number `question`; `text` is truncated to HVL_STACK_BYTES.
void answer(HostMemory* memory, int local_rank, uint32_t question, const std::string& text);
// Makes await_question() return 0 from now on, also a call under way.
void stop_answering(HostMemory* memory, int local_rank);

// The coordinator's side: one round of requests to some ranks at a time.
class StackDumpRequests {
 public:
  // `pids` by local rank; empty: the ranks are threads of this process. `ranks`: of this host, by local rank,
  // ascending; the others cannot be asked. `relays`: by rank, the relays of its messages to rank 0, in order.
  StackDumpRequests(std::shared_ptr<HostMemory> memory, std::vector<int> pids, std::vector<int> ranks,
                    std::vector<std::vector<int>> relays = {});

  void ask(const std::vector<int>& ranks, uint64_t now);
  // True if all asked ranks have answered, or their time is over.
  bool is_over(uint64_t now);
  // Returns the answers as text; ranks with equal answers are listed together.
  std::string report();

 private:
  struct Question {
    int rank = 0;
    int local_rank = -1;  // -1: it is on another host
    uint32_t number = 0;
  };

  bool has_answered(const Question& question);
  std::string answer_of(const Question& question);
  std::string name_of(const Question& question) const;
  std::string why_silent(const Question& question) const;
  std::string why_not_asked(int rank) const;

  std::shared_ptr<HostMemory> memory_;
  std::vector<int> pids_;
  std::vector<int> ranks_;
  std::vector<std::vector<int>> relays_;
  std::vector<Question> questions_;
  uint64_t asked_at_ = 0;
};

}  // namespace hvl
