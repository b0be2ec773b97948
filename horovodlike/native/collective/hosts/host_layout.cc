#include "collective/hosts/host_layout.h"

#include <map>
#include <utility>

namespace hvl {

Layout::Layout(TeamPtr given, const std::vector<int>& hosts, int rank) : team(std::move(given)) {
  const int host_here = hosts[static_cast<size_t>(rank)];
  std::map<int, std::vector<int>> by_host;
  for (int member : team->ranks) by_host[hosts[static_cast<size_t>(member)]].push_back(member);
  for (auto& [host, ranks] : by_host) {
    if (host == host_here) mine = members.size();
    num_lanes = std::max(num_lanes, ranks.size());
    members.push_back(std::move(ranks));
  }
  place = static_cast<size_t>(std::find(here().begin(), here().end(), rank) - here().begin());
  for (size_t lane = 0; lane < num_lanes; ++lane) {
    if (lane % here().size() == place) lanes.push_back(lane);
  }
  // Local ranks are in the order of ranks.
  std::vector<int> local_ranks;
  int local_rank = 0;
  int my_local_rank = 0;
  for (int each = 0; each < static_cast<int>(hosts.size()); ++each) {
    if (hosts[static_cast<size_t>(each)] != host_here) continue;
    if (each == rank) my_local_rank = local_rank;
    if (team->contains(each)) local_ranks.push_back(local_rank);
    ++local_rank;
  }
  local = std::make_shared<Team>(std::move(local_ranks), my_local_rank);
}

}  // namespace hvl
