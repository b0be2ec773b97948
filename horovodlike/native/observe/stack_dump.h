// How the coordinator learns where the Python threads of another rank are: it asks in shared memory, a Python thread of
// that rank which sleeps there writes the answer beside the question, and the coordinator reads it in passing.
//
// Neither engine takes part on the other side, and no signal is sent: a signal would interrupt system calls of code
// that does not expect it. The price: a rank that holds the interpreter's lock in native code does not answer, and the
// report says so.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "shm/host_memory.h"

namespace hvl {

// How long a rank has to answer. It needs milliseconds, unless it is the rank that is stuck.
constexpr uint64_t kAnswerTime = 2 * kSecond;

// Whether a signal or a debugger has stopped a process of this host.
bool is_stopped(int pid);

// Any thread of the rank that is asked: sleeps until there is a question, and returns its number; 0: there will be
// none, as the rank leaves.
uint32_t await_question(HostMemory* memory, int local_rank);
// The answer to that question, cut off where there is no room for more.
void answer(HostMemory* memory, int local_rank, uint32_t question, const std::string& text);
// Ends await_question() now and from now on.
void stop_answering(HostMemory* memory, int local_rank);

// The coordinator's side: one question to some ranks at a time.
class StackDumpRequests {
 public:
  // `pids` by local rank; empty: the ranks are threads of this process. `ranks`: of this host, by local rank,
  // ascending; the others cannot be asked. `relays`: by rank, the ranks that relay its requests, from it upwards.
  StackDumpRequests(std::shared_ptr<HostMemory> memory, std::vector<int> pids, std::vector<int> ranks,
                    std::vector<std::vector<int>> relays = {});

  void ask(const std::vector<int>& ranks, uint64_t now);
  // All have answered, or their time is over.
  bool is_over(uint64_t now);
  // Their answers; ranks with the same answer are together.
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
