// Jobs on several hosts: places of all kinds, arrays of all types, and what a reduction of them is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/minifloat.h"
#include "check.h"
#include "job_of_threads.h"

namespace hvl {

// By rank, the number of its host. The control connections are a tree of three levels where there are seven hosts.
inline const std::vector<std::vector<int>> kPlaces = {
    {0, 1}, {0, 0, 1, 1}, {0, 1, 2, 3}, {0, 0, 1, 2}, {0, 1, 0, 1, 1}, {0, 1, 1, 1, 2, 2}, {0, 1, 2, 3, 4, 5, 6},
};

inline EngineOptions on_hosts(const std::vector<int>& hosts) {
  EngineOptions options;
  options.hosts = hosts;
  options.fan_out = 2;
  options.host_names = {"a", "b", "c", "d", "e", "f", "g"};
  return options;
}

// Calls function(job) for jobs on hosts of all kinds, of which every second one is impatient: its waits are over after
// a few microseconds, in the middle of collectives, and begin again. What goes between hosts is sealed in half of both.
// One more job on each kind of hosts has connections of memory. Briefly there is one job with sockets, too.
template <typename Function>
void on_all_places(Function&& function, int64_t slot_bytes = 4096) {
  bool brief_overlap = false;
  bool seals = true;
  for (const std::vector<int>& hosts : kPlaces) {
    brief_overlap = !brief_overlap;
    if (brief_overlap) seals = !seals;
    const auto run = [&](bool overlap, const Wiring& wiring) {
      EngineOptions options = on_hosts(hosts);
      options.overlap = overlap;
      Job job(static_cast<int>(hosts.size()), options, slot_bytes, 4, wiring);
      if (!overlap) job.become_impatient(20 * kMicrosecond);
      function(job);
    };
    for (bool overlap : {true, false}) {
      Wiring wiring;
      wiring.seals_data = seals == overlap;
      if (!check::is_brief || overlap == brief_overlap) run(overlap, wiring);
    }
    run(brief_overlap, in_memory());
  }
}

using Bytes = std::vector<char>;

// Any integers; numbers of which sums round, but do not overflow. By splitmix64: the generators of the standard library
// are slow where sanitizers look at each access to their state.
inline Bytes random_array(DataType dtype, size_t count, unsigned seed) {
  Bytes array(count * size_of(dtype));
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    uint64_t state = seed;
    for (size_t i = 0; i < count; ++i) {
      uint64_t bits = state += 0x9e3779b97f4a7c15;
      bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9;
      bits = (bits ^ bits >> 27) * 0x94d049bb133111eb;
      bits ^= bits >> 31;
      T element;
      if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
        element = static_cast<T>(bits);
      } else {
        const double number = static_cast<double>(bits >> 11) / static_cast<double>(uint64_t{1} << 52) - 1.0;
        element = narrow<T>(std::is_same_v<T, bool> && number < 0 ? 0.0 : number);
      }
      std::memcpy(array.data() + i * sizeof element, &element, sizeof element);
    }
  });
  return array;
}

// The definition: floating-point numbers of each host are reduced to their own type, in the order of ranks, then those
// of the hosts, in theirs; what is exact, all at once. Where each host has one rank, or there is only one, that is the
// same.
inline Bytes reduced(const Reduction& whole, const std::vector<const char*>& of_ranks, const std::vector<int>& hosts,
                     size_t count) {
  std::map<int, std::vector<const void*>> by_host;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) by_host[hosts[rank]].push_back(of_ranks[rank]);
  Bytes result(count * size_of(whole.dtype) + 1);
  if (!is_floating(whole.dtype) || by_host.size() == of_ranks.size() || by_host.size() == 1) {
    const std::vector<const void*> sources(of_ranks.begin(), of_ranks.end());
    reduce_scalar(whole, sources.data(), static_cast<int>(sources.size()), result.data(), count);
    return result;
  }
  size_t most = 0;
  for (const auto& entry : by_host) most = std::max(most, entry.second.size());
  // An average of float16 goes between hosts made smaller, so that no sum is out of range.
  const bool shrinks = has_small_range(whole.dtype) && whole.divisor > 1;
  const double shrinking = shrinks ? std::exp2(-std::ceil(std::log2(static_cast<double>(most)))) : 1.0;
  Reduction first = whole;
  first.prescale *= shrinking;
  first.op = whole.op == HVL_AVERAGE ? HVL_SUM : whole.op;
  first.divisor = 1;
  first.postscale = 1.0;
  Reduction second = whole;
  second.prescale = 1.0 / shrinking;
  std::vector<Bytes> of_hosts;
  std::vector<const void*> sources;
  for (const auto& [host, ranks] : by_host) {
    of_hosts.emplace_back(result.size());
    reduce_scalar(first, ranks.data(), static_cast<int>(ranks.size()), of_hosts.back().data(), count);
  }
  for (const Bytes& each : of_hosts) sources.push_back(each.data());
  reduce_scalar(second, sources.data(), static_cast<int>(sources.size()), result.data(), count);
  return result;
}

// An operation on one tensor of any type.
inline std::shared_ptr<Operation> make_of(const std::string& name, Kind kind, const Reduction& reduction,
                                          const Shape& shape) {
  auto operation = make(name, kind, {shape}, reduction.op);
  operation->signature.tensors[0].dtype = reduction.dtype;
  operation->signature.prescale = reduction.prescale;
  operation->signature.postscale = reduction.postscale;
  operation->num_bytes[0] = operation->signature.tensors[0].num_bytes();
  operation->total_bytes = operation->num_bytes[0];
  return operation;
}

}  // namespace hvl
