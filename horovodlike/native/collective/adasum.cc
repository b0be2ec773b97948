#include "collective/adasum.h"

#include <algorithm>
#include <utility>

#include "base/minifloat.h"

namespace hvl {

namespace {

const FinalBytes kNobodyWaits = [](uint64_t) {};

double coefficient(double product, double square) { return square > 0 ? 1.0 - product / (2.0 * square) : 1.0; }

}  // namespace

// The previous contents are lost.
void Adasum::Scratch::make_room(uint64_t bytes) {
  if (bytes <= num_bytes) return;
  free();
  data.reset(new char[bytes]);
  num_bytes = bytes;
}

void Adasum::Scratch::free() {
  data.reset();
  num_bytes = 0;
}

uint64_t Adasum::part_begin(size_t tensor, size_t place) const { return counts_[tensor] * place / size_; }

uint64_t Adasum::part_length(size_t place) const {
  uint64_t length = 0;
  for (size_t t = 0; t < counts_.size(); ++t) length += part_begin(t, place + 1) - part_begin(t, place);
  return length;
}

size_t Adasum::num_pairs() const {
  size_t pairs = 0;
  for (size_t first = 0; first + stride() < num_vectors(); first += 2 * stride()) ++pairs;
  return pairs;
}

void Adasum::begin(const Batch& batch, const Team& team, std::vector<AveragedMembers> averaged) {
  batch_ = &batch;
  averaged_ = std::move(averaged);
  size_ = team.size();
  mine_ = team.mine;
  stage_ = Stage::kExchange;
  level_ = 0;
  is_double_ = false;
  counts_.clear();
  uint64_t total = 0;
  for (const Segment& segment : batch.segments()) {
    counts_.push_back(segment.num_bytes / size_of(segment.reduction.dtype));
    total += counts_.back();
    is_double_ |= segment.reduction.dtype == HVL_FLOAT64;
  }
  const uint64_t width = is_double_ ? sizeof(double) : sizeof(float);
  packed_.make_room(total * width + 1);  // + 1: not null even if empty
  received_.make_room(part_length(mine_) * width * size_ + 1);
  is_double_ ? pack<double>() : pack<float>();
  exchange_ = Exchange{};
  gather_ = Gather{received_.data.get(), {}};
  char* next = packed_.data.get();
  const uint64_t my_bytes = part_length(mine_) * width;
  for (size_t place = 0; place < size_; ++place) {
    const uint64_t num_bytes = part_length(place) * width;
    exchange_.sent.push_back({next, num_bytes});
    exchange_.received.push_back({received_.data.get() + place * my_bytes, my_bytes});
    exchange_.longest = std::max(exchange_.longest, num_bytes);
    gather_.blocks.push_back({next, num_bytes});
    next += num_bytes;
  }
}

Status Adasum::resume(DataPlane* data_plane) {
  Status status;
  for (;;) {
    switch (stage_) {
      case Stage::kExchange:
        status = data_plane->alltoall(exchange_);
        if (!status.ok()) return status;
        is_double_ ? average<double>() : average<float>();
        stage_ = Stage::kMultiply;
        break;
      case Stage::kMultiply:
        stage_ = num_pairs() == 0 ? Stage::kGather : Stage::kAddUp;
        if (num_pairs() > 0) is_double_ ? multiply<double>() : multiply<float>();
        break;
      case Stage::kAddUp:
        status = data_plane->allreduce(sums_, kNobodyWaits);
        if (!status.ok()) return status;
        is_double_ ? combine<double>() : combine<float>();
        ++level_;
        stage_ = Stage::kMultiply;
        break;
      case Stage::kGather:
        status = data_plane->allgather(gather_);
        if (!status.ok()) return status;
        is_double_ ? unpack<double>() : unpack<float>();
        for (Scratch* scratch : {&packed_, &received_}) {
          if (scratch->num_bytes > kMostKept / 2) scratch->free();
        }
        return status;
    }
  }
}

template <typename Real>
void Adasum::pack() {
  Real* next = reinterpret_cast<Real*>(packed_.data.get());
  for (size_t place = 0; place < size_; ++place) {
    for (size_t t = 0; t < counts_.size(); ++t) {
      const Segment& segment = batch_->segments()[t];
      const Real factor = static_cast<Real>(segment.reduction.prescale);
      with_type(segment.reduction.dtype, [&](auto zero) {
        const auto* elements = reinterpret_cast<const decltype(zero)*>(segment.input);
        for (uint64_t i = part_begin(t, place); i < part_begin(t, place + 1); ++i) {
          *next++ = factor * static_cast<Real>(widen(elements[i]));
        }
      });
    }
  }
}

template <typename Real>
void Adasum::unpack() {
  const Real* next = reinterpret_cast<const Real*>(packed_.data.get());
  for (size_t place = 0; place < size_; ++place) {
    for (size_t t = 0; t < counts_.size(); ++t) {
      const Segment& segment = batch_->segments()[t];
      const Real factor = static_cast<Real>(segment.reduction.postscale);
      with_type(segment.reduction.dtype, [&](auto zero) {
        using T = decltype(zero);
        T* elements = reinterpret_cast<T*>(segment.output);
        for (uint64_t i = part_begin(t, place); i < part_begin(t, place + 1); ++i) {
          elements[i] = narrow<T>(factor * *next++);
        }
      });
    }
  }
}

// Writes the average of group n over row n. Row n is not needed any more then: as groups are in the order of their
// first members, its member is in an earlier group, or is the first member of group n.
template <typename Real>
void Adasum::average() {
  Real* rows = reinterpret_cast<Real*>(received_.data.get());
  const uint64_t length = part_length(mine_);
  for (size_t group = 0; group < averaged_.size(); ++group) {
    const std::vector<size_t>& places = averaged_[group].places;
    const Real divisor = static_cast<Real>(averaged_[group].divisor);
    Real* result = rows + group * length;
    for (uint64_t i = 0; i < length; ++i) {
      Real sum = 0;
      for (size_t place : places) sum += rows[place * length + i];
      result[i] = sum / divisor;
    }
  }
}

// Computes this member's share of the dot products.
template <typename Real>
void Adasum::multiply() {
  products_.assign(3 * counts_.size() * num_pairs(), 0.0);
  const Real* vectors = reinterpret_cast<const Real*>(received_.data.get());
  const uint64_t length = part_length(mine_);
  double* product = products_.data();
  for (size_t first = 0; first + stride() < num_vectors(); first += 2 * stride()) {
    const Real* a = vectors + first * length;
    const Real* b = vectors + (first + stride()) * length;
    for (size_t t = 0; t < counts_.size(); ++t, product += 3) {
      const uint64_t count = part_begin(t, mine_ + 1) - part_begin(t, mine_);
      for (uint64_t i = 0; i < count; ++i, ++a, ++b) {
        product[0] += static_cast<double>(*a) * static_cast<double>(*b);
        product[1] += static_cast<double>(*a) * static_cast<double>(*a);
        product[2] += static_cast<double>(*b) * static_cast<double>(*b);
      }
    }
  }
  Reduction sum;
  sum.dtype = HVL_FLOAT64;
  char* data = reinterpret_cast<char*>(products_.data());
  sums_.clear();
  sums_.add(data, data, products_.size() * sizeof(double), sum);
}

template <typename Real>
void Adasum::combine() {
  Real* vectors = reinterpret_cast<Real*>(received_.data.get());
  const uint64_t length = part_length(mine_);
  const double* product = products_.data();
  for (size_t first = 0; first + stride() < num_vectors(); first += 2 * stride()) {
    Real* a = vectors + first * length;
    const Real* b = vectors + (first + stride()) * length;
    for (size_t t = 0; t < counts_.size(); ++t, product += 3) {
      const Real of_a = static_cast<Real>(coefficient(product[0], product[1]));
      const Real of_b = static_cast<Real>(coefficient(product[0], product[2]));
      const uint64_t count = part_begin(t, mine_ + 1) - part_begin(t, mine_);
      for (uint64_t i = 0; i < count; ++i, ++a, ++b) *a = of_a * *a + of_b * *b;
    }
  }
}

}  // namespace hvl
