// The data plane that moves bytes between ranks with another library, such as MPI, through hvl_external.
//
// The library adds up float32 and float64. For all other reductions, each rank receives its part of the data from all
// ranks, and reduces it with the engine's arithmetic: such results have the same bits as on the other data planes. Data
// to send is packed into a buffer, piece by piece; a tensor that is alone, or as large as the buffer, is sent in place.
#pragma once

#include <memory>
#include <vector>

#include "collective/data_plane.h"
#include "collective/loopback.h"
#include "sync/waiter.h"

namespace hvl {

struct ExternalOptions {
  hvl_external functions;
  uint64_t buffer_bytes = 8 << 20;    // bytes that are packed for one library call; a multiple of kAlignment
  uint64_t in_place_bytes = 1 << 30;  // most bytes that one call sends in place; a multiple of kAlignment
};

// Only the engine's own thread may use it: no function returns HVL_IN_PROGRESS.
class ExternalDataPlane : public DataPlane {
 public:
  // The options are the same on all ranks.
  ExternalDataPlane(const ExternalOptions& options, int local_rank, Waiter* waiter);
  ~ExternalDataPlane() override;
  ExternalDataPlane(const ExternalDataPlane&) = delete;
  ExternalDataPlane& operator=(const ExternalDataPlane&) = delete;

  void begin(TeamPtr team, uint64_t number) override;
  hvl_transport transport() const override { return HVL_EXTERNAL; }
  bool holds_memory() const override { return in_progress_; }

  Status allreduce(const Batch& batch, const FinalBytes& final_bytes) override;
  Status reduce_to(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) override;
  Status allgather(const Gather& gather) override;
  Status reducescatter(const Scatter& scatter) override;
  Status alltoall(const Exchange& exchange) override;

 private:
  // Memory that is kept from one collective to the next.
  struct Buffer {
    std::unique_ptr<char[]> data;
    uint64_t num_bytes = 0;

    char* of(uint64_t bytes);  // the contents are lost if `bytes` is more than before
  };

  // The data of one library call: a packed range of a batch's stream, or a part of one segment.
  struct Piece {
    const Segment* in_place;  // null: packed
    uint64_t begin;
    uint64_t end;
  };
  // Bytes `offset` to `offset + num_bytes` of one rank's block.
  struct Cut {
    uint64_t offset;
    uint64_t num_bytes;
  };

  size_t size() const { return team_->size(); }
  size_t mine() const { return team_->mine; }
  std::vector<Piece> cut(const Batch& batch, bool reduces) const;
  template <typename Blocks>
  static void cut_blocks(const Blocks& blocks, uint64_t offset, uint64_t step, std::vector<Cut>* cuts);

  Status add_up_in_place(const Piece& piece);
  Status add_up(const Batch& batch, const Piece& piece);
  Status exchange_and_reduce(const Batch& batch, const Piece& piece);
  Status add_up_cuts(const Scatter& scatter, const std::vector<Cut>& cuts);
  Status exchange_and_reduce_cuts(const Scatter& scatter, const std::vector<Cut>& cuts);
  Status allgather_at_once(const Gather& gather);
  Status call_alltoallv();
  Status finish(int32_t begun);

  const hvl_external functions_;
  const uint64_t buffer_bytes_;
  const uint64_t in_place_bytes_;
  const int local_rank_;
  Waiter* const waiter_;
  LoopbackDataPlane loopback_;  // for teams of one rank
  TeamPtr team_;
  std::vector<int32_t> ranks_;
  hvl_team native_team_{};
  Buffer sent_;
  Buffer received_;
  Buffer block_;                       // this rank's reduced block, if another rank is the root
  std::vector<int64_t> numbers_sent_;  // by place: elements or bytes
  std::vector<int64_t> numbers_received_;
  bool in_progress_ = false;
};

}  // namespace hvl
