// The placement of a team on hosts, and the roles of its members between hosts.
//
// Data between hosts is divided into lanes, as many as the largest number of members on one host. On each host a lane
// belongs to one member, its owner; the owners of a lane exchange its bytes.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "collective/data_plane.h"

namespace hvl {

struct Layout {
  // `hosts`: the host number of each rank of the job. `rank`: this rank, a member of the team.
  Layout(TeamPtr given, const std::vector<int>& hosts, int rank) : team(std::move(given)) {
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

  size_t num_hosts() const { return members.size(); }
  const std::vector<int>& here() const { return members[mine]; }
  bool is_flat() const { return num_lanes == 1; }  // one member on each host
  int owner(size_t host, size_t lane) const { return members[host][lane % members[host].size()]; }
  // The member of another host that sends to this rank on behalf of that host.
  int partner_on(size_t host) const { return members[host][place % members[host].size()]; }

  TeamPtr team;
  std::vector<std::vector<int>> members;  // ranks by host, in order of host numbers; hosts without members are left out
  size_t mine = 0;                        // the index of this rank's host in `members`
  size_t place = 0;                       // this rank's place among its host's members
  size_t num_lanes = 1;
  std::vector<size_t> lanes;  // the lanes that this rank owns
  TeamPtr local;              // this host's members, by local rank
};

}  // namespace hvl
