#include "negotiate/validate.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>

#include "negotiate/rank_set.h"

namespace hvl {
namespace {

constexpr size_t kMostValues = 4;  // values that an error message shows

// The ranks with one value of a field.
struct Holders {
  std::string value;
  std::vector<int> ranks;
};

using ValueText = std::function<std::string(const Signature&)>;

std::string text_of(double factor) {
  char text[32];
  for (int digits : {15, 17}) {
    std::snprintf(text, sizeof text, "%.*g", digits, factor);
    if (std::strtod(text, nullptr) == factor) break;
  }
  return text;
}

std::string text_of(const Shape& shape, bool any_first) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) {
    if (d > 0) text += ", ";
    text += any_first && d == 0 ? "*" : std::to_string(shape[d]);
  }
  return text + "]";
}

std::string title_of(const Signature& signature) {
  return std::string(name_of(signature.kind)) + " '" + signature.name + "'";
}

// Groups the ranks by value. The value of most ranks comes first; of equally common values, the lowest rank's.
std::vector<Holders> holders_of(const std::vector<Proposal>& proposals, const ValueText& value_of) {
  std::vector<Holders> all;
  for (const Proposal& proposal : proposals) {
    const std::string value = value_of(proposal.signature);
    auto same = std::find_if(all.begin(), all.end(), [&](const Holders& holders) { return holders.value == value; });
    if (same == all.end()) same = all.insert(all.end(), {value, {}});
    same->ranks.insert(same->ranks.end(), proposal.ranks.begin(), proposal.ranks.end());
  }
  for (Holders& holders : all) std::sort(holders.ranks.begin(), holders.ranks.end());
  std::sort(all.begin(), all.end(), [](const Holders& a, const Holders& b) {
    return a.ranks.size() != b.ranks.size() ? a.ranks.size() > b.ranks.size() : a.ranks[0] < b.ranks[0];
  });
  return all;
}

std::string text_of(const std::vector<Holders>& all) {
  std::string text;
  size_t num_others = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i >= kMostValues) {
      num_others += all[i].ranks.size();
      continue;
    }
    if (i > 0) text += ", ";
    text += text_of_ranks(all[i].ranks) + (all[i].ranks.size() == 1 ? " has " : " have ") + all[i].value;
  }
  if (num_others == 1) text += ", 1 other rank has another value";
  if (num_others > 1) text += ", " + std::to_string(num_others) + " other ranks have other values";
  return text;
}

// Returns ok if all ranks have the same value. `what`: the name of the values, a plural.
Status compare(const std::vector<Proposal>& proposals, const char* what, const std::string& title,
               const ValueText& value_of) {
  const std::vector<Holders> all = holders_of(proposals, value_of);
  if (all.size() == 1) return Status();
  return Status(HVL_MISMATCH, std::string("Mismatched ") + what + " for " + title + ": " + text_of(all) + ".");
}

Status compare_tensor(const std::vector<Proposal>& proposals, size_t t) {
  const Signature& first = proposals[0].signature;
  const bool has_format = first.kind == HVL_ALLREDUCE;
  const auto equal = [&](const Proposal& p) {
    return p.signature.tensors[t] == first.tensors[t] &&
           (!has_format || p.signature.memory_format(t) == first.memory_format(t));
  };
  if (std::all_of(proposals.begin(), proposals.end(), equal)) return Status();

  std::string title = title_of(first);
  if (first.tensors.size() > 1) title += ", tensor with index " + std::to_string(t) + " of the group";
  Status status =
      compare(proposals, "data types", title, [t](const Signature& s) { return name_of(s.tensors[t].dtype); });
  if (!status.ok()) return status;
  if (!allocates(first.kind)) {
    status =
        compare(proposals, "shapes", title, [t](const Signature& s) { return text_of(s.tensors[t].shape, false); });
    if (!status.ok() || !has_format) return status;
    return compare(proposals, "memory formats", title, [t](const Signature& s) { return name_of(s.memory_format(t)); });
  }
  status = compare(proposals, "numbers of dimensions", title,
                   [t](const Signature& s) { return std::to_string(s.tensors[t].shape.size()); });
  if (!status.ok()) return status;
  return compare(proposals, "dimensions other than the first", title,
                 [t](const Signature& s) { return text_of(s.tensors[t].shape, true); });
}

// Fields without meaning for a kind, such as the root of an allreduce, are not compared.
Status compare_all(const std::vector<Proposal>& proposals) {
  if (proposals.size() == 1) return Status();
  const Signature& first = proposals[0].signature;
  Status status =
      compare(proposals, "operations", "'" + first.name + "'", [](const Signature& s) { return name_of(s.kind); });
  const auto then = [&](bool applies, const char* what, const ValueText& value_of) {
    if (applies && status.ok()) status = compare(proposals, what, title_of(first), value_of);
  };
  const bool reduces = is_reduction(first.kind);
  then(true, "devices", [](const Signature& s) { return name_of(s.device); });
  then(reduces, "reduction operations", [](const Signature& s) { return name_of(s.op); });
  then(has_root(first.kind), "root ranks", [](const Signature& s) { return std::to_string(s.root); });
  then(reduces, "prescale factors", [](const Signature& s) { return text_of(s.prescale); });
  then(reduces, "postscale factors", [](const Signature& s) { return text_of(s.postscale); });
  then(first.kind == HVL_ADD_PROCESS_SET, "requesting ranks",
       [](const Signature& s) { return std::string(s.is_by_members() ? "the members" : "all ranks"); });
  then(changes_process_sets(first.kind), "arguments", [](const Signature& s) { return text_of(s.arguments, false); });
  then(true, "numbers of tensors", [](const Signature& s) { return std::to_string(s.tensors.size()); });
  for (size_t t = 0; status.ok() && t < first.tensors.size(); ++t) status = compare_tensor(proposals, t);
  return status;
}

Status invalid(const std::string& text) { return Status(HVL_INVALID_ARGUMENT, text); }

Status check_arguments(const Signature& signature, const std::vector<int>& members, int size) {
  const std::string title = title_of(signature);
  if (has_root(signature.kind) && !std::binary_search(members.begin(), members.end(), signature.root)) {
    return invalid("Root rank " + std::to_string(signature.root) + " of " + title + " is not one of its ranks, " +
                   text_of_ranks(members) + ".");
  }
  if (signature.kind == HVL_ADD_PROCESS_SET && (signature.arguments.empty() || signature.arguments.back() >= size)) {
    return invalid("A process set is made of ranks from 0 to " + std::to_string(size - 1) + ", not of " +
                   text_of(signature.arguments, false) + ".");
  }
  const auto is_scalar = [](const TensorSignature& tensor) { return tensor.shape.empty(); };
  if (needs_rows(signature.kind) && std::any_of(signature.tensors.begin(), signature.tensors.end(), is_scalar)) {
    return invalid(std::string(name_of(signature.kind)) + " needs at least one dimension: " + title +
                   " has a scalar tensor.");
  }
  return Status();
}

// False if the bytes of the output do not fit into int64.
bool fits(const Signature& signature) {
  int64_t total = 0;
  for (const TensorSignature& tensor : signature.tensors) {
    int64_t bytes = static_cast<int64_t>(size_of(tensor.dtype));
    for (int64_t extent : tensor.shape) {
      // As in decode(): zeros are left out, so that the product never overflows on the way.
      if (extent > 0 && __builtin_mul_overflow(bytes, extent, &bytes)) return false;
    }
    if (__builtin_add_overflow(total, bytes, &total)) return false;
  }
  return true;
}

// Checks that each tensor of an alltoall has a number of rows for each member.
Status check_splits(const std::vector<Proposal>& proposals, size_t num_members) {
  if (proposals[0].signature.kind != HVL_ALLTOALL) return Status();
  const size_t num_tensors = proposals[0].signature.tensors.size();
  for (const Proposal& proposal : proposals) {
    for (size_t i = 0; i < proposal.ranks.size(); ++i) {
      const size_t num_splits = proposal.varying[i].size() / num_tensors - 1;
      if (num_splits == num_members) continue;
      return invalid(title_of(proposal.signature) + " on rank " + std::to_string(proposal.ranks[i]) + " has " +
                     std::to_string(num_splits) + " splits for " + std::to_string(num_members) + " ranks.");
    }
  }
  return Status();
}

// Lays out the varying values by rank, and puts the sums of the first dimensions into the signature. False on overflow.
bool combine_varying(const std::vector<Proposal>& proposals, size_t size, Verdict* verdict) {
  std::vector<TensorSignature>& tensors = verdict->signature.tensors;
  const size_t per_rank = proposals[0].varying[0].size();
  verdict->varying_per_rank = static_cast<uint32_t>(per_rank);
  verdict->varying.assign(per_rank * size, 0);
  for (const Proposal& proposal : proposals) {
    for (size_t i = 0; i < proposal.ranks.size(); ++i) {
      const std::vector<int64_t>& numbers = proposal.varying[i];
      const size_t begin = static_cast<size_t>(proposal.ranks[i]) * per_rank;
      std::copy(numbers.begin(), numbers.end(), verdict->varying.begin() + static_cast<ptrdiff_t>(begin));
      for (size_t t = 0; t < tensors.size(); ++t) {
        if (__builtin_add_overflow(tensors[t].shape[0], numbers[t], &tensors[t].shape[0])) return false;
      }
    }
  }
  return fits(verdict->signature);
}

Proposal* find_or_add(Signature signature, std::vector<Proposal>* proposals) {
  auto same = std::find_if(proposals->begin(), proposals->end(),
                           [&](const Proposal& proposal) { return proposal.signature == signature; });
  if (same == proposals->end()) same = proposals->insert(same, Proposal{std::move(signature), {}, {}});
  return &*same;
}

}  // namespace

void add_to_proposals(int rank, Signature signature, std::vector<Proposal>* proposals) {
  std::vector<int64_t> varying = take_varying(&signature);
  Proposal* proposal = find_or_add(std::move(signature), proposals);
  proposal->ranks.push_back(rank);
  if (allocates(proposal->signature.kind)) proposal->varying.push_back(std::move(varying));
}

void add_to_proposals(const Message& request, std::vector<Proposal>* proposals) {
  Signature signature = request.signature;
  std::vector<int64_t> same = take_varying(&signature);
  Proposal* proposal = find_or_add(std::move(signature), proposals);
  request.ranks.for_each([&](int rank) { proposal->ranks.push_back(rank); });
  if (!allocates(proposal->signature.kind)) return;
  const size_t num_ranks = static_cast<size_t>(request.ranks.size());
  if (request.varying.empty()) return proposal->varying.resize(proposal->ranks.size(), same);
  const size_t per_rank = request.varying.size() / num_ranks;
  for (auto begin = request.varying.begin(); begin != request.varying.end();
       begin += static_cast<ptrdiff_t>(per_rank)) {
    proposal->varying.emplace_back(begin, begin + static_cast<ptrdiff_t>(per_rank));
  }
}

Verdict agree(std::vector<Proposal> proposals, const std::vector<int>& members, int size) {
  Verdict verdict;
  verdict.status = compare_all(proposals);
  if (!verdict.status.ok()) return verdict;

  // If only meaningless values differ, the lowest rank's are used, in any order of arrival.
  const auto lowest = [](const Proposal& p) { return *std::min_element(p.ranks.begin(), p.ranks.end()); };
  auto chosen = std::min_element(proposals.begin(), proposals.end(),
                                 [&](const Proposal& a, const Proposal& b) { return lowest(a) < lowest(b); });
  verdict.signature = chosen->signature;
  verdict.status = check_arguments(verdict.signature, members, size);
  if (!verdict.status.ok() || !allocates(verdict.signature.kind)) return verdict;
  verdict.status = check_splits(proposals, members.size());
  if (!verdict.status.ok()) return verdict;
  if (!combine_varying(proposals, static_cast<size_t>(size), &verdict)) {
    verdict.status = invalid("The output of " + title_of(verdict.signature) + " is too large.");
  }
  return verdict;
}

}  // namespace hvl
