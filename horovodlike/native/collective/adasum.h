// Adaptive summation of gradients: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020,
// https://arxiv.org/abs/2006.02924.
//
// For two vectors: (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b, which is their sum if they are orthogonal and their
// mean if they are equal. For more vectors: neighbours are combined, then the results of neighbours, and so on; a
// vector without a neighbour waits for the next level. Each tensor is a separate vector. Before that, the vectors of
// groups of members may be averaged.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "collective/data_plane.h"

namespace hvl {

// A group of members whose vectors are averaged: the average is one of the vectors that Adasum combines.
struct AveragedMembers {
  std::vector<size_t> places;  // in the team, ascending
  int divisor = 1;
};

// Combines one batch. Each member of the team receives one part of all vectors, and combines these parts. Only the dot
// products need the parts of all members: an allreduce adds them up, once per level. So each byte is sent about twice,
// as in an allreduce, and all members end with the same bits. Takes twice the memory of the batch in float32, or
// float64 if it has such a tensor, and keeps no more than kMostKept of that memory for the next batch.
class Adasum {
 public:
  static constexpr uint64_t kMostKept = 2 << 20;  // bytes

  // `batch` has floating-point tensors, and must live until resume() is done. `averaged`: groups of all members, in the
  // order of their first members; empty: each member's vector is combined as it is.
  void begin(const Batch& batch, const Team& team, std::vector<AveragedMembers> averaged = {});
  // HVL_IN_PROGRESS: interrupted; the next call continues.
  Status resume(DataPlane* data_plane);
  uint64_t kept_bytes() const { return packed_.num_bytes + received_.num_bytes; }

 private:
  enum class Stage { kExchange, kMultiply, kAddUp, kGather };

  struct Scratch {
    std::unique_ptr<char[]> data;
    uint64_t num_bytes = 0;

    void make_room(uint64_t bytes);
    void free();
  };

  template <typename Real>
  void pack();
  template <typename Real>
  void average();
  template <typename Real>
  void multiply();
  template <typename Real>
  void combine();
  template <typename Real>
  void unpack();
  uint64_t part_begin(size_t tensor, size_t place) const;  // elements
  uint64_t part_length(size_t place) const;
  size_t num_vectors() const { return averaged_.empty() ? size_ : averaged_.size(); }
  // Each level combines pairs of vectors that are stride() apart; the result replaces the first vector of the pair.
  size_t stride() const { return size_t{1} << level_; }
  size_t num_pairs() const;

  const Batch* batch_ = nullptr;
  size_t size_ = 1;
  size_t mine_ = 0;
  bool is_double_ = false;
  Stage stage_ = Stage::kExchange;
  unsigned level_ = 0;
  std::vector<AveragedMembers> averaged_;
  std::vector<uint64_t> counts_;  // elements of each tensor
  Scratch packed_;                // all tensors: the first member's parts, then the second member's ...
  Scratch received_;              // this member's part of each member's vectors; once averaged, of each group's
  std::vector<double> products_;  // a.b, a.a and b.b of each pair and tensor
  Exchange exchange_;
  Batch sums_;
  Gather gather_;
};

}  // namespace hvl
