// Whether what the ranks ask for under one name fits together.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "negotiate/message.h"
#include "negotiate/signature.h"

namespace hvl {

// One value that some ranks ask for, without what may vary.
struct Proposal {
  Signature signature;
  std::vector<int> ranks;
  std::vector<std::vector<int64_t>> varying;  // of each of the `ranks`; empty where nothing may vary
};

// Adds what one rank asks for to the proposal that it equals, or as a new one.
void add_to_proposals(int rank, Signature signature, std::vector<Proposal>* proposals);

// The same of all ranks for which the request speaks.
void add_to_proposals(const Message& request, std::vector<Proposal>* proposals);

// Either an error that names the tensor, the ranks and their values, or what to define: see Record.
struct Verdict {
  Status status;
  Signature signature;
  std::vector<int64_t> varying;
  uint32_t varying_per_rank = 0;
};

// `proposals` must not be empty. The verdict does not depend on their order. `members`: of the process set.
Verdict agree(std::vector<Proposal> proposals, const std::vector<int>& members, int size);

}  // namespace hvl
