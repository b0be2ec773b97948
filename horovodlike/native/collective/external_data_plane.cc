#include "collective/external_data_plane.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "base/memory.h"
#include "collective/blocks.h"
#include "negotiate/rank_set.h"

namespace hvl {

namespace {

bool adds_up(const Reduction& reduction) {
  return (reduction.dtype == HVL_FLOAT32 || reduction.dtype == HVL_FLOAT64) &&
         (reduction.op == HVL_SUM || reduction.op == HVL_AVERAGE);
}

// True if both can be in one piece: the library adds both up with one call, or neither.
bool go_together(const Reduction& a, const Reduction& b) {
  return adds_up(a) == adds_up(b) && (!adds_up(a) || a.dtype == b.dtype);
}

uint64_t count_of(uint64_t num_bytes, const Reduction& reduction) { return num_bytes / size_of(reduction.dtype); }

void copy(const void* from, void* to, uint64_t num_bytes) {
  if (from != to && num_bytes > 0) memcpy(to, from, num_bytes);
}

void scale(const Reduction& reduction, const void* from, void* to, uint64_t num_bytes) {
  if (reduction.prescale == 1.0) return copy(from, to, num_bytes);
  Reduction scaling;
  scaling.dtype = reduction.dtype;
  scaling.prescale = reduction.prescale;
  reduce(scaling, Arrays{&from, 1, &to, 1, count_of(num_bytes, reduction)});
}

// Makes the NaNs of all ranks equal: the sum of two NaNs is one of them, depending on their order, and so on the rank.
template <typename Real>
void make_nans_equal(void* data, uint64_t count) {
  Real* values = static_cast<Real*>(data);
  for (uint64_t i = 0; i < count; ++i) {
    values[i] = values[i] != values[i] ? std::numeric_limits<Real>::quiet_NaN() : values[i];
  }
}

// Computes the result from the library's sum.
void finish_sum(const Reduction& reduction, const void* from, void* to, uint64_t num_bytes) {
  const uint64_t count = count_of(num_bytes, reduction);
  if (reduction.divisor == 1 && reduction.postscale == 1.0) {
    copy(from, to, num_bytes);
  } else {
    Reduction scaling = reduction;
    scaling.prescale = 1.0;
    reduce(scaling, Arrays{&from, 1, &to, 1, count});
  }
  reduction.dtype == HVL_FLOAT32 ? make_nans_equal<float>(to, count) : make_nans_equal<double>(to, count);
}

}  // namespace

char* ExternalDataPlane::Buffer::of(uint64_t bytes) {
  if (bytes > num_bytes) {
    data.reset();
    num_bytes = 0;
    data.reset(new char[bytes]());
    num_bytes = bytes;
  }
  return data.get();
}

ExternalDataPlane::ExternalDataPlane(const ExternalOptions& options, int local_rank, Waiter* waiter)
    : functions_(options.functions),
      buffer_bytes_(options.buffer_bytes),
      in_place_bytes_(options.in_place_bytes),
      local_rank_(local_rank),
      waiter_(waiter) {}

ExternalDataPlane::~ExternalDataPlane() {
  if (!in_progress_) return;
  leak(sent_.data.release());
  leak(received_.data.release());
  leak(block_.data.release());
}

void ExternalDataPlane::begin(TeamPtr team, uint64_t) {
  team_ = std::move(team);
  ranks_.assign(team_->ranks.begin(), team_->ranks.end());
  native_team_ = {ranks_.data(), static_cast<int32_t>(size()), static_cast<int32_t>(mine())};
  numbers_sent_.assign(size(), 0);
  numbers_received_.assign(size(), 0);
}

// Neighbouring segments that can be in one piece are packed together. A segment without such neighbours, or one that
// fills the buffer, is sent in place, unless its reduction is one that the library cannot do.
std::vector<ExternalDataPlane::Piece> ExternalDataPlane::cut(const Batch& batch, bool reduces) const {
  const std::vector<Segment>& segments = batch.segments();
  const auto is_large = [&](const Segment& segment) { return segment.num_bytes >= buffer_bytes_; };
  std::vector<Piece> pieces;
  for (size_t first = 0, last; first < segments.size(); first = last) {
    const Segment& segment = segments[first];
    for (last = first + 1; last < segments.size() && !is_large(segment) && !is_large(segments[last]); ++last) {
      if (reduces && !go_together(segment.reduction, segments[last].reduction)) break;
    }
    const bool in_place = last == first + 1 && (!reduces || adds_up(segment.reduction));
    const uint64_t end = in_place                 ? segment.offset + segment.num_bytes
                         : last < segments.size() ? segments[last].offset
                                                  : batch.num_bytes();
    const uint64_t most = in_place ? in_place_bytes_ : buffer_bytes_;
    for (uint64_t begin = segment.offset; begin < end; begin += most) {
      pieces.push_back({in_place ? &segment : nullptr, begin, std::min(begin + most, end)});
    }
  }
  return pieces;
}

Status ExternalDataPlane::allreduce(const Batch& batch, const FinalBytes& final_bytes) {
  if (size() == 1) return loopback_.allreduce(batch, final_bytes);
  for (const Piece& piece : cut(batch, true)) {
    Status status;
    if (piece.in_place != nullptr) {
      status = add_up_in_place(piece);
    } else {
      Reduction first;  // decides for the whole piece
      batch.for_each_piece(piece.begin, piece.begin + 1,
                           [&](const Segment& segment, uint64_t, uint64_t, uint64_t) { first = segment.reduction; });
      status = adds_up(first) ? add_up(batch, piece) : exchange_and_reduce(batch, piece);
    }
    if (!status.ok()) return status;
    final_bytes(align(piece.end));  // no tensor has bytes in the gap before the next segment
  }
  return Status();
}

Status ExternalDataPlane::add_up_in_place(const Piece& piece) {
  const Segment& segment = *piece.in_place;
  const Reduction& reduction = segment.reduction;
  const uint64_t offset = piece.begin - segment.offset;
  const uint64_t num_bytes = piece.end - piece.begin;
  const char* input = segment.input + offset;
  char* output = segment.output + offset;
  if (reduction.prescale != 1.0) {
    scale(reduction, input, output, num_bytes);
    input = output;
  }
  Status status = finish(functions_.allreduce(functions_.context, &native_team_, input, output,
                                              static_cast<int64_t>(count_of(num_bytes, reduction)), reduction.dtype));
  if (status.ok()) finish_sum(reduction, output, output, num_bytes);
  return status;
}

Status ExternalDataPlane::add_up(const Batch& batch, const Piece& piece) {
  const uint64_t num_bytes = piece.end - piece.begin;
  char* packed = sent_.of(num_bytes);
  Reduction any;
  batch.for_each_piece(piece.begin, piece.end, [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t bytes) {
    scale(segment.reduction, segment.input + from, packed + at, bytes);
    any = segment.reduction;
  });
  // This includes the padding in the gaps, which is never unpacked.
  Status status = finish(functions_.allreduce(functions_.context, &native_team_, packed, packed,
                                              static_cast<int64_t>(count_of(num_bytes, any)), any.dtype));
  if (!status.ok()) return status;
  batch.for_each_piece(piece.begin, piece.end, [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t bytes) {
    finish_sum(segment.reduction, packed + at, segment.output + from, bytes);
  });
  return status;
}

// Each rank receives its part from all ranks, reduces it, and sends the result to all.
Status ExternalDataPlane::exchange_and_reduce(const Batch& batch, const Piece& piece) {
  const uint64_t num_bytes = piece.end - piece.begin;
  const auto part_begin = [&](size_t place) {
    return place == size() ? num_bytes : num_bytes * place / size() / kAlignment * kAlignment;
  };
  const uint64_t my_begin = part_begin(mine());
  const uint64_t my_bytes = part_begin(mine() + 1) - my_begin;
  char* packed = sent_.of(num_bytes);
  char* parts = received_.of(my_bytes * size() + 1);  // + 1: not null even if empty
  batch.for_each_piece(piece.begin, piece.end, [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t bytes) {
    copy(segment.input + from, packed + at, bytes);
  });
  for (size_t place = 0; place < size(); ++place) {
    numbers_sent_[place] = static_cast<int64_t>(part_begin(place + 1) - part_begin(place));
    numbers_received_[place] = static_cast<int64_t>(my_bytes);
  }
  Status status = call_alltoallv();
  if (!status.ok()) return status;
  std::vector<const void*> sources(size());
  const uint64_t begin = piece.begin + my_begin;
  batch.for_each_piece(begin, begin + my_bytes, [&](const Segment& segment, uint64_t, uint64_t at, uint64_t bytes) {
    for (size_t place = 0; place < size(); ++place) sources[place] = parts + place * my_bytes + at;
    void* result = packed + my_begin + at;
    reduce(segment.reduction,
           Arrays{sources.data(), static_cast<int>(size()), &result, 1, count_of(bytes, segment.reduction)});
  });
  status =
      finish(functions_.allgatherv(functions_.context, &native_team_, packed + my_begin, packed, numbers_sent_.data()));
  if (!status.ok()) return status;
  batch.for_each_piece(piece.begin, piece.end, [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t bytes) {
    copy(packed + at, segment.output + from, bytes);
  });
  return status;
}

// Each rank reduces its block of a segment, and sends it to the root.
Status ExternalDataPlane::reduce_to(const Batch& batch, int root, const FinalBytes& final_bytes) {
  if (size() == 1) return loopback_.allreduce(batch, final_bytes);
  for (const Segment& segment : batch.segments()) {
    Scatter scatter = in_blocks(segment, size());
    const Block<const char>& block = scatter.blocks[mine()];
    scatter.output = root == static_cast<int>(mine()) ? segment.output + (block.data - segment.input)
                                                      : block_.of(block.num_bytes + 1);  // + 1: not null even if empty
    Status status = reducescatter(scatter);
    if (status.ok()) {
      status = alltoall(gather_to(static_cast<size_t>(root), mine(), scatter.output, segment.output, scatter.blocks));
    }
    if (!status.ok()) return status;
    final_bytes(align(segment.offset + segment.num_bytes));
  }
  return Status();
}

Status ExternalDataPlane::broadcast(const Batch& batch, int root, const FinalBytes& final_bytes) {
  if (size() == 1) return loopback_.broadcast(batch, root, final_bytes);
  const bool is_root = root == static_cast<int>(mine());
  for (const Piece& piece : cut(batch, false)) {
    const uint64_t num_bytes = piece.end - piece.begin;
    char* data = nullptr;
    if (piece.in_place != nullptr) {
      const Segment& segment = *piece.in_place;
      const uint64_t offset = piece.begin - segment.offset;
      data = segment.output + offset;
      if (is_root) copy(segment.input + offset, data, num_bytes);
    } else {
      data = sent_.of(num_bytes);
      batch.for_each_piece(piece.begin, piece.end,
                           [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t bytes) {
                             if (!is_root) return;
                             copy(segment.input + from, data + at, bytes);
                             copy(segment.input + from, segment.output + from, bytes);
                           });
    }
    Status status = finish(functions_.broadcast(functions_.context, &native_team_, data,
                                                static_cast<int64_t>(num_bytes), static_cast<int32_t>(root)));
    if (!status.ok()) return status;
    if (piece.in_place == nullptr && !is_root) {
      batch.for_each_piece(piece.begin, piece.end,
                           [&](const Segment& segment, uint64_t from, uint64_t at, uint64_t bytes) {
                             copy(data + at, segment.output + from, bytes);
                           });
    }
    final_bytes(align(piece.end));
  }
  return Status();
}

template <typename Blocks>
void ExternalDataPlane::cut_blocks(const Blocks& blocks, uint64_t offset, uint64_t step, std::vector<Cut>* cuts) {
  cuts->clear();
  for (const auto& block : blocks) {
    const uint64_t begin = std::min(offset, block.num_bytes);
    cuts->push_back({begin, std::min(step, block.num_bytes - begin)});
  }
}

Status ExternalDataPlane::allgather_at_once(const Gather& gather) {
  for (size_t place = 0; place < size(); ++place) {
    numbers_received_[place] = static_cast<int64_t>(gather.blocks[place].num_bytes);
  }
  return finish(functions_.allgatherv(functions_.context, &native_team_, gather.input, gather.blocks[0].data,
                                      numbers_received_.data()));
}

Status ExternalDataPlane::allgather(const Gather& gather) {
  if (size() == 1) return loopback_.allgather(gather);
  uint64_t total = 0;
  uint64_t longest = 0;
  for (const Block<char>& block : gather.blocks) {
    total += block.num_bytes;
    longest = std::max(longest, block.num_bytes);
  }
  if (total == 0) return Status();
  if (total <= in_place_bytes_) return allgather_at_once(gather);
  const uint64_t step = share_of_each(buffer_bytes_, size(), longest);
  std::vector<Cut> cuts;
  Status status;
  for (uint64_t offset = 0; status.ok() && offset < longest; offset += step) {
    cut_blocks(gather.blocks, offset, step, &cuts);
    for (size_t place = 0; place < size(); ++place) {
      numbers_received_[place] = static_cast<int64_t>(cuts[place].num_bytes);
    }
    const char* next = received_.of(step * size());
    status = finish(functions_.allgatherv(functions_.context, &native_team_, gather.input + cuts[mine()].offset,
                                          received_.data.get(), numbers_received_.data()));
    for (size_t place = 0; status.ok() && place < size(); ++place) {
      copy(next, gather.blocks[place].data + cuts[place].offset, cuts[place].num_bytes);
      next += cuts[place].num_bytes;
    }
  }
  return status;
}

Status ExternalDataPlane::reducescatter(const Scatter& scatter) {
  if (size() == 1) return loopback_.reducescatter(scatter);
  uint64_t longest = 0;
  for (const auto& block : scatter.blocks) longest = std::max(longest, block.num_bytes);
  const uint64_t step = share_of_each(buffer_bytes_, size(), longest);
  std::vector<Cut> cuts;
  Status status;
  for (uint64_t offset = 0; status.ok() && offset < longest; offset += step) {
    cut_blocks(scatter.blocks, offset, step, &cuts);
    char* next = sent_.of(step * size());
    for (size_t place = 0; place < size(); ++place) {
      const char* from = scatter.blocks[place].data + cuts[place].offset;
      if (adds_up(scatter.reduction)) {
        scale(scatter.reduction, from, next, cuts[place].num_bytes);
      } else {
        copy(from, next, cuts[place].num_bytes);
      }
      next += cuts[place].num_bytes;
    }
    status = adds_up(scatter.reduction) ? add_up_cuts(scatter, cuts) : exchange_and_reduce_cuts(scatter, cuts);
  }
  return status;
}

Status ExternalDataPlane::add_up_cuts(const Scatter& scatter, const std::vector<Cut>& cuts) {
  for (size_t place = 0; place < size(); ++place) {
    numbers_sent_[place] = static_cast<int64_t>(count_of(cuts[place].num_bytes, scatter.reduction));
  }
  char* output = scatter.output + cuts[mine()].offset;
  Status status = finish(functions_.reducescatter(functions_.context, &native_team_, sent_.data.get(), output,
                                                  numbers_sent_.data(), scatter.reduction.dtype));
  if (status.ok()) finish_sum(scatter.reduction, output, output, cuts[mine()].num_bytes);
  return status;
}

Status ExternalDataPlane::exchange_and_reduce_cuts(const Scatter& scatter, const std::vector<Cut>& cuts) {
  const uint64_t my_bytes = cuts[mine()].num_bytes;
  char* parts = received_.of(my_bytes * size() + 1);  // + 1: not null even if empty
  std::vector<const void*> sources(size());
  for (size_t place = 0; place < size(); ++place) {
    numbers_sent_[place] = static_cast<int64_t>(cuts[place].num_bytes);
    numbers_received_[place] = static_cast<int64_t>(my_bytes);
    sources[place] = parts + place * my_bytes;
  }
  Status status = call_alltoallv();
  if (!status.ok()) return status;
  void* output = scatter.output + cuts[mine()].offset;
  reduce(scatter.reduction,
         Arrays{sources.data(), static_cast<int>(size()), &output, 1, count_of(my_bytes, scatter.reduction)});
  return status;
}

Status ExternalDataPlane::alltoall(const Exchange& exchange) {
  if (size() == 1) return loopback_.alltoall(exchange);
  std::vector<Cut> sent;
  std::vector<Cut> received;
  const uint64_t step = share_of_each(buffer_bytes_, size(), exchange.longest);
  Status status;
  for (uint64_t offset = 0; status.ok() && offset < exchange.longest; offset += step) {
    cut_blocks(exchange.sent, offset, step, &sent);
    cut_blocks(exchange.received, offset, step, &received);
    char* next = sent_.of(step * size());
    for (size_t place = 0; place < size(); ++place) {
      copy(exchange.sent[place].data + sent[place].offset, next, sent[place].num_bytes);
      next += sent[place].num_bytes;
      numbers_sent_[place] = static_cast<int64_t>(sent[place].num_bytes);
      numbers_received_[place] = static_cast<int64_t>(received[place].num_bytes);
    }
    const char* came = received_.of(step * size());
    status = call_alltoallv();
    for (size_t place = 0; status.ok() && place < size(); ++place) {
      copy(came, exchange.received[place].data + received[place].offset, received[place].num_bytes);
      came += received[place].num_bytes;
    }
  }
  return status;
}

Status ExternalDataPlane::call_alltoallv() {
  return finish(functions_.alltoallv(functions_.context, &native_team_, sent_.data.get(), numbers_sent_.data(),
                                     received_.data.get(), numbers_received_.data()));
}

// Waits until the library is done. If the job is broken before that, the library may continue to use the memory.
Status ExternalDataPlane::finish(int32_t begun) {
  int32_t state = begun;
  const auto is_done = [&] {
    if (state == HVL_IN_PROGRESS) state = functions_.test(functions_.context);
    return state != HVL_IN_PROGRESS;
  };
  const auto who = [&] {  // only the library knows which of them is late
    std::vector<int> others = team_->ranks;
    others.erase(others.begin() + static_cast<std::ptrdiff_t>(mine()));
    return (others.size() > 1 ? "one of " : "") + text_of_ranks(others);
  };
  in_progress_ = true;
  Status status = waiter_->wait_polling(is_done, who);
  if (!status.ok()) return status;
  in_progress_ = false;
  if (state == HVL_OK) return status;
  return Status(HVL_JOB_BROKEN, waiter_->describe(local_rank_) + ": " + functions_.error(functions_.context));
}

}  // namespace hvl
