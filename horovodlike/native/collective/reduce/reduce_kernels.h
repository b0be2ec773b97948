// The vector loops of reduce(), as templates over `Level` (kVectorBytes: the width of its registers) and dtype, op and
// so on. Only for the translation units of the levels: each includes this after its HVL_TARGET_* and instantiates it
// with a type of an unnamed namespace (see base/target.h).
//
// A tile of a few vectors stays in registers while all sources are combined into it, so the arrays are read once and
// written once for any number of sources. Every element goes through the same operations in the same order at any
// position of the array; that is why results do not depend on how an array is cut.
#pragma once

#include "base/target.h"
#include "collective/reduce/reduce.h"
#include "collective/reduce/reduce_elements.h"

namespace hvl {

template <class Level, class Element, class Op, class Scale>
class Kernel {
 public:
  HVL_ALWAYS_INLINE Kernel(const Reduction& reduction, const Arrays& arrays)
      : scale_(reduction),
        sources_(arrays.sources),
        num_sources_(arrays.num_sources),
        dsts_(arrays.dsts),
        num_dsts_(arrays.num_dsts) {}

  HVL_ALWAYS_INLINE void run(size_t count) const {
    constexpr size_t kTile = kTileVectors * kLanes;
    constexpr size_t kAhead = kPrefetchAhead / sizeof(Storage);
    prefetch(0, count < kAhead ? count : kAhead);
    size_t first = 0;
    for (; first + kTile <= count; first += kTile) {
      if (first + kAhead < count) prefetch(first + kAhead, kTile);
      reduce_tile<kTileVectors>(first);
    }
    for (; first + kLanes <= count; first += kLanes) reduce_tile<1>(first);
    if (first < count) reduce_rest(first, count - first);
  }

 private:
  using Storage = typename Element::Storage;
  using Value = typename Element::Value;
  using Format = typename Element::template On<Level::kVectorBytes>;
  using Stored = typename Format::Stored;
  static constexpr int kParts = Format::kParts;
  static constexpr size_t kLanes = sizeof(Stored) / sizeof(Storage);
  static constexpr size_t kTileVectors = 4 / kParts;
  using Values = Registers<Vector<Value, Level::kVectorBytes>, kParts>;

  HVL_ALWAYS_INLINE const char* address(int source, size_t first) const {
    return static_cast<const char*>(sources_[source]) + first * sizeof(Storage);
  }

  // Loads a whole vector, or only its first `count` elements and zeros.
  HVL_ALWAYS_INLINE Values load(int source, size_t first, size_t count = kLanes) const {
    Stored stored{};
    __builtin_memcpy(&stored, address(source, first), count * sizeof(Storage));
    Values values = Format::widen(stored);
    for (auto& part : values.parts) part = scale_.before(part);
    return values;
  }

  HVL_ALWAYS_INLINE char* result(int dst, size_t first) const {
    return static_cast<char*>(dsts_[dst]) + first * sizeof(Storage);
  }

  HVL_ALWAYS_INLINE void store(Values values, size_t first, size_t count = kLanes) const {
    for (auto& part : values.parts) part = scale_.after(part);
    const Stored stored = Format::narrow(values);
    for (int dst = 0; dst < num_dsts_; ++dst) __builtin_memcpy(result(dst, first), &stored, count * sizeof(Storage));
  }

  HVL_ALWAYS_INLINE void prefetch(size_t first, size_t count) const {
    for (int dst = 0; dst < num_dsts_; ++dst) prefetch_to_write(result(dst, first), count * sizeof(Storage));
  }

  static HVL_ALWAYS_INLINE void combine(Values& result, const Values& values) {
    for (int part = 0; part < kParts; ++part) {
      result.parts[part] = Op::apply(result.parts[part], values.parts[part]);
    }
  }

  template <size_t kVectors>
  HVL_ALWAYS_INLINE void reduce_tile(size_t first) const {
    Values tile[kVectors];
    HVL_UNROLL
    for (size_t v = 0; v < kVectors; ++v) tile[v] = load(0, first + v * kLanes);
    for (int source = 1; source < num_sources_; ++source) {
      HVL_UNROLL
      for (size_t v = 0; v < kVectors; ++v) combine(tile[v], load(source, first + v * kLanes));
    }
    HVL_UNROLL
    for (size_t v = 0; v < kVectors; ++v) store(tile[v], first + v * kLanes);
  }

  // Reduces fewer elements than a vector has: the results of the other lanes are not stored.
  HVL_ALWAYS_INLINE void reduce_rest(size_t first, size_t count) const {
    Values values = load(0, first, count);
    for (int source = 1; source < num_sources_; ++source) combine(values, load(source, first, count));
    store(values, first, count);
  }

  Scale scale_;
  const void* const* sources_;
  int num_sources_;
  void* const* dsts_;
  int num_dsts_;
};

template <class Level, class Element, class Op, class Scale>
void run_kernel(const Reduction& reduction, const Arrays& arrays) {
  Kernel<Level, Element, Op, Scale>(reduction, arrays).run(arrays.count);
}

template <class Level, class Element, class Op>
void reduce_floats_with(const Reduction& reduction, const Arrays& arrays) {
  using F = typename Element::Value;
  const bool scaled = reduction.prescale != 1.0 || reduction.postscale != 1.0;
  if (scaled) return run_kernel<Level, Element, Op, FloatScale<F>>(reduction, arrays);
  return run_kernel<Level, Element, Op, NoScale>(reduction, arrays);
}

template <class Level, class Element>
void average_floats(const Reduction& reduction, const Arrays& arrays) {
  using F = typename Element::Value;
  const bool scaled = reduction.prescale != 1.0 || reduction.postscale != 1.0;
  if (!scaled && is_power_of_two(reduction.divisor)) {
    return run_kernel<Level, Element, AddOp, PowerOfTwoAverage<F>>(reduction, arrays);
  }
  return run_kernel<Level, Element, AddOp, FloatAverage<F>>(reduction, arrays);
}

template <class Level, class Element>
void reduce_floats(const Reduction& reduction, const Arrays& arrays) {
  switch (reduction.op) {
    case HVL_MIN: return reduce_floats_with<Level, Element, MinOp>(reduction, arrays);
    case HVL_MAX: return reduce_floats_with<Level, Element, MaxOp>(reduction, arrays);
    case HVL_PRODUCT: return reduce_floats_with<Level, Element, MultiplyOp>(reduction, arrays);
    case HVL_SUM: return reduce_floats_with<Level, Element, AddOp>(reduction, arrays);
    default: return average_floats<Level, Element>(reduction, arrays);
  }
}

// Sum and Product use the unsigned type of the same width: they give the same bits, and their overflow is defined.
template <class Level, class T>
void reduce_integers(const Reduction& reduction, const Arrays& arrays) {
  using Wide = std::conditional_t<sizeof(T) <= 2, int32_t, int64_t>;
  using Unsigned = std::make_unsigned_t<T>;
  using WideSum = WideElement<T, std::make_unsigned_t<Wide>>;
  switch (reduction.op) {
    case HVL_MIN: return run_kernel<Level, PlainElement<T>, MinOp, NoScale>(reduction, arrays);
    case HVL_MAX: return run_kernel<Level, PlainElement<T>, MaxOp, NoScale>(reduction, arrays);
    case HVL_PRODUCT: return run_kernel<Level, PlainElement<Unsigned>, MultiplyOp, NoScale>(reduction, arrays);
    case HVL_SUM: return run_kernel<Level, PlainElement<Unsigned>, AddOp, NoScale>(reduction, arrays);
    default: return run_kernel<Level, WideSum, AddOp, IntegerAverage<Wide>>(reduction, arrays);
  }
}

template <class Level>
void reduce_bools(const Reduction& reduction, const Arrays& arrays) {
  const bool all = reduction.op == HVL_MIN || reduction.op == HVL_PRODUCT;
  if (all) return run_kernel<Level, BoolElement, AndOp, NoScale>(reduction, arrays);
  return run_kernel<Level, BoolElement, OrOp, NoScale>(reduction, arrays);
}

template <class Level>
void reduce_vectors(const Reduction& reduction, const Arrays& arrays) {
  with_type(reduction.dtype, [&](auto zero) {
    using T = decltype(zero);
    using Float = std::conditional_t<kIsMinifloat<T>, MinifloatElement<T>, PlainElement<T>>;
    if constexpr (std::is_same_v<T, bool>) {
      reduce_bools<Level>(reduction, arrays);
    } else if constexpr (kIsFloating<T>) {
      reduce_floats<Level, Float>(reduction, arrays);
    } else {
      reduce_integers<Level, T>(reduction, arrays);
    }
  });
}

// A template, so that a build without dispatch generates no code for it.
template <class Level>
void reduce_if_built(const Reduction& reduction, const Arrays& arrays) {
  if constexpr (kDispatch) reduce_vectors<Level>(reduction, arrays);
}

}  // namespace hvl
