// The check that the ranks' requests under one name agree.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "negotiate/message.h"
#include "negotiate/signature.h"

namespace hvl {

// One signature that some ranks request, without the varying values.
struct Proposal {
  Signature signature;
  std::vector<int> ranks;
  std::vector<std::vector<int64_t>> varying;  // the varying values of each of the `ranks`; empty if nothing may vary
};

// Adds one rank's request to the proposal with the same signature, or as a new proposal.
void add_to_proposals(int rank, Signature signature, std::vector<Proposal>* proposals);

// Adds the requests of all ranks that the message names.
void add_to_proposals(const Message& request, std::vector<Proposal>* proposals);

// Either an error that names the tensor, the ranks and their values, or the definition: see Record.
struct Verdict {
  Status status;
  Signature signature;
  std::vector<int64_t> varying;
  uint32_t varying_per_rank = 0;
};

// `proposals` must not be empty. The verdict does not depend on their order. `members`: the process set's members.
Verdict agree(std::vector<Proposal> proposals, const std::vector<int>& members, int size);

}  // namespace hvl
