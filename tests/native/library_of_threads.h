// A library for ExternalDataPlane that works between the threads of a Job, and does what an MPI library may do: it is
// not done before it has been tested a few times, and adds up in another order on each rank.
#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "collective/external_data_plane.h"

namespace hvl {

class LibraryOfThreads {
 public:
  hvl_external functions() {
    hvl_external table{};
    table.context = this;
    table.allreduce = allreduce;
    table.reducescatter = reducescatter;
    table.broadcast = broadcast;
    table.allgatherv = allgatherv;
    table.alltoallv = alltoallv;
    table.test = test;
    table.error = [](void*) { return "the library is out of order"; };
    table.broken = [](void* context, const char*) { of(context)->num_broken += 1; };
    return table;
  }

  // Writes to the promised memory, although no thread waits for it any more.
  void write_late() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& entry : meetings_) {
      if (entry.second->done) continue;
      for (auto& [place, call] : entry.second->calls) {
        memset(call.received, 1,
               static_cast<size_t>(sum_of(call.bytes_received, static_cast<int>(call.bytes_received.size()))));
      }
    }
  }

  std::atomic<int64_t> longest{0};  // bytes that a member received in one call
  std::atomic<int> num_broken{0};
  std::atomic<int> num_calls{0};  // of all members
  std::string failing;            // the function that fails on rank 1

 private:
  // The arguments of one member for one collective.
  struct Call {
    const char* sent;
    char* received;
    std::vector<int64_t> bytes_sent;  // to each place, one block after the other
    std::vector<int64_t> bytes_received;
  };

  struct Meeting {
    std::map<int, Call> calls;  // by place
    bool done = false;
  };
  using Finish = void (*)(Meeting*, int argument);

  struct Pending {
    std::shared_ptr<Meeting> meeting;
    int num_tests = 0;
  };

  static LibraryOfThreads* of(void* context) { return static_cast<LibraryOfThreads*>(context); }
  static int64_t sum_of(const std::vector<int64_t>& numbers, int count) {
    return std::accumulate(numbers.begin(), numbers.begin() + count, int64_t{0});
  }
  static int64_t size_of_dtype(int32_t dtype) { return static_cast<int64_t>(size_of(static_cast<DataType>(dtype))); }

  // The last member to arrive does it for all.
  int32_t meet(const char* name, const hvl_team& team, Call call, Finish finish, int argument = 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++num_calls;
    const int rank = team.ranks[team.mine];
    if (failing == name && rank == 1) return HVL_RESOURCES;
    longest = std::max(longest.load(), sum_of(call.bytes_received, static_cast<int>(call.bytes_received.size())));
    const std::vector<int> ranks(team.ranks, team.ranks + team.size);
    std::shared_ptr<Meeting>& meeting = meetings_[{ranks, next_[{ranks, rank}]++}];
    if (meeting == nullptr) meeting = std::make_shared<Meeting>();
    this_rank() = rank;
    pending_[rank] = {meeting, 0};
    meeting->calls.emplace(team.mine, std::move(call));
    if (meeting->calls.size() == ranks.size()) {
      finish(meeting.get(), argument);
      meeting->done = true;
    }
    return HVL_IN_PROGRESS;
  }

  static int32_t test(void* context) {
    LibraryOfThreads* library = of(context);
    std::lock_guard<std::mutex> lock(library->mutex_);
    Pending& pending = library->pending_.at(this_rank());
    return ++pending.num_tests > 3 && pending.meeting->done ? HVL_OK : HVL_IN_PROGRESS;
  }

  // Each rank's engine has a thread of its own.
  static int& this_rank() {
    thread_local int rank = -1;
    return rank;
  }

  // The sum of all members' elements from `begin` on, which starts with those of `first`.
  template <typename Real>
  static std::vector<Real> add_up(const Meeting& meeting, int first, int64_t begin, int64_t num_bytes) {
    std::vector<Real> sum(static_cast<size_t>(num_bytes) / sizeof(Real));
    const int size = static_cast<int>(meeting.calls.size());
    for (int place = first; place < first + size; ++place) {
      const char* sent = meeting.calls.at(place % size).sent + begin;
      for (size_t i = 0; i < sum.size(); ++i) {
        Real element;
        memcpy(&element, sent + i * sizeof(Real), sizeof(Real));
        sum[i] = place == first ? element : sum[i] + element;
      }
    }
    return sum;
  }

  // `bytes_sent` says where each member's block of the sum begins, if it is not the whole.
  template <typename Real>
  static void give_sums(Meeting* meeting) {
    std::map<int, std::vector<Real>> sums;
    for (const auto& [place, call] : meeting->calls) {
      const int64_t begin = call.bytes_sent.empty() ? 0 : sum_of(call.bytes_sent, place);
      sums[place] = add_up<Real>(*meeting, place, begin, call.bytes_received[0]);
    }
    for (const auto& [place, call] : meeting->calls) {
      if (!sums[place].empty()) memcpy(call.received, sums[place].data(), static_cast<size_t>(call.bytes_received[0]));
    }
  }

  static void finish_sums(Meeting* meeting, int dtype) {
    dtype == HVL_FLOAT32 ? give_sums<float>(meeting) : give_sums<double>(meeting);
  }

  static int32_t allreduce(void* context, const hvl_team* team, const void* sent, void* received, int64_t count,
                           int32_t dtype) {
    CHECK(dtype == HVL_FLOAT32 || dtype == HVL_FLOAT64);
    Call call{static_cast<const char*>(sent), static_cast<char*>(received), {}, {count * size_of_dtype(dtype)}};
    return of(context)->meet("allreduce", *team, std::move(call), finish_sums, dtype);
  }

  static int32_t reducescatter(void* context, const hvl_team* team, const void* sent, void* received,
                               const int64_t* counts, int32_t dtype) {
    CHECK(dtype == HVL_FLOAT32 || dtype == HVL_FLOAT64);
    Call call{static_cast<const char*>(sent), static_cast<char*>(received), {}, {}};
    for (int place = 0; place < team->size; ++place) call.bytes_sent.push_back(counts[place] * size_of_dtype(dtype));
    call.bytes_received.push_back(call.bytes_sent[static_cast<size_t>(team->mine)]);
    return of(context)->meet("reducescatter", *team, std::move(call), finish_sums, dtype);
  }

  static int32_t broadcast(void* context, const hvl_team* team, void* data, int64_t num_bytes, int32_t root) {
    Call call{static_cast<const char*>(data), static_cast<char*>(data), {}, {num_bytes}};
    const Finish spread = [](Meeting* meeting, int source) {
      const Call& from = meeting->calls.at(source);
      for (const auto& [place, to] : meeting->calls) {
        CHECK_EQ(to.bytes_received[0], from.bytes_received[0]);
        if (place != source) memcpy(to.received, from.sent, static_cast<size_t>(from.bytes_received[0]));
      }
    };
    return of(context)->meet("broadcast", *team, std::move(call), spread, root);
  }

  static int32_t allgatherv(void* context, const hvl_team* team, const void* sent, void* received,
                            const int64_t* num_bytes) {
    Call call{static_cast<const char*>(sent), static_cast<char*>(received), {}, {num_bytes, num_bytes + team->size}};
    const Finish gather = [](Meeting* meeting, int) {
      for (const auto& [to, receiver] : meeting->calls) {
        char* next = receiver.received;
        for (const auto& [from, sender] : meeting->calls) {
          CHECK(sender.bytes_received == receiver.bytes_received);
          const int64_t block = sender.bytes_received[static_cast<size_t>(from)];
          if (next != sender.sent && block > 0) memcpy(next, sender.sent, static_cast<size_t>(block));
          next += block;
        }
      }
    };
    return of(context)->meet("allgatherv", *team, std::move(call), gather);
  }

  static int32_t alltoallv(void* context, const hvl_team* team, const void* sent, const int64_t* bytes_sent,
                           void* received, const int64_t* bytes_received) {
    Call call{static_cast<const char*>(sent),
              static_cast<char*>(received),
              {bytes_sent, bytes_sent + team->size},
              {bytes_received, bytes_received + team->size}};
    const Finish exchange = [](Meeting* meeting, int) {
      for (const auto& [to, receiver] : meeting->calls) {
        char* next = receiver.received;
        for (const auto& [from, sender] : meeting->calls) {
          const int64_t block = sender.bytes_sent[static_cast<size_t>(to)];
          CHECK_EQ(block, receiver.bytes_received[static_cast<size_t>(from)]);
          if (block > 0) memcpy(next, sender.sent + sum_of(sender.bytes_sent, to), static_cast<size_t>(block));
          next += block;
        }
      }
    };
    return of(context)->meet("alltoallv", *team, std::move(call), exchange);
  }

  std::mutex mutex_;
  std::map<std::pair<std::vector<int>, int>, std::shared_ptr<Meeting>> meetings_;
  std::map<std::pair<std::vector<int>, int>, int> next_;  // a member's next collective, by team and rank
  std::map<int, Pending> pending_;                        // by rank
};

}  // namespace hvl
