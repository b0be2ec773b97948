// How a team lies on hosts, and who of it does what between them.
//
// What goes between hosts is divided into lanes: as many as the host with the most members has members. On each host a
// lane is one member's; the members that have the same lane exchange its bytes.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "collective/team.h"

namespace hvl {

struct Layout {
  // `hosts`: by rank of the job, the number of its host. `rank`: this one, a member of the team.
  Layout(TeamPtr given, const std::vector<int>& hosts, int rank);

  size_t num_hosts() const { return members.size(); }
  const std::vector<int>& here() const { return members[mine]; }
  bool is_flat() const { return num_lanes == 1; }  // one member on each host
  int owner(size_t host, size_t lane) const { return members[host][lane % members[host].size()]; }
  // Who of another host stands for all of its members towards this rank.
  int partner_on(size_t host) const { return members[host][place % members[host].size()]; }

  TeamPtr team;
  std::vector<std::vector<int>> members;  // ranks, by host in order of their numbers; hosts without members left out
  size_t mine = 0;                        // this rank's host among them
  size_t place = 0;                       // and its place among the host's members
  size_t num_lanes = 1;
  std::vector<size_t> lanes;  // this rank's
  TeamPtr local;              // this host's members, by local rank
};

}  // namespace hvl
