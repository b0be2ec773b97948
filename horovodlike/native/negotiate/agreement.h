// Whether what the ranks ask for under one name fits together.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "negotiate/signature.h"

namespace hvl {

// One value that some ranks ask for. Allgather: with 0 as the first dimensions, which may differ.
struct Proposal {
  Signature signature;
  std::vector<int> ranks;
  std::vector<std::vector<int64_t>> first_dims;  // [position in `ranks`][tensor]; empty unless allgather
};

// Adds what one rank asks for to the proposal that it equals, or as a new one.
void add_to_proposals(int rank, Signature signature, std::vector<Proposal>* proposals);

// Either an error that names the tensor, the ranks and their values, or what to define: see Record.
struct Verdict {
  Status status;
  Signature signature;
  std::vector<int64_t> first_dims;
};

// `proposals` must not be empty. The verdict does not depend on their order.
Verdict agree(std::vector<Proposal> proposals, int size);

}  // namespace hvl
