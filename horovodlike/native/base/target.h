// Everything that depends on the compiler and the processor: run-time dispatch to wider vector instructions,
// prefetching.
//
// The code of a translation unit between HVL_TARGET_AVX2 or HVL_TARGET_AVX512 and HVL_TARGET_END is compiled for that
// level, whatever the flags of the build; it may run only if cpu_level() is at least that level. Inline functions that
// such a unit emits must be its own (templates over a type of an unnamed namespace): else the linker could choose their
// code for other units, which run on older processors. No ifunc: its resolvers run before a sanitizer is ready.
// HVL_NO_DISPATCH builds the baseline only. HVL_TARGET_SHA marks a single function in the same way; its callers check
// has_sha_instructions(). HVL_UNROLL unrolls the loop after it, whose few iterations then work on registers.
#pragma once

#include <cstddef>

#define HVL_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define HVL_UNROLL _Pragma("clang loop unroll(full)")
#define HVL_TARGET(level) HVL_PRAGMA(clang attribute push(__attribute__((target(level))), apply_to = function))
#define HVL_TARGET_END _Pragma("clang attribute pop")
#if __clang_major__ >= 18 && __clang_major__ <= 21  // others do not have or need this feature
#define HVL_WIDEST ",evex512"
#else
#define HVL_WIDEST
#endif
#else
#define HVL_UNROLL _Pragma("GCC unroll 4")
#define HVL_TARGET(level) _Pragma("GCC push_options") HVL_PRAGMA(GCC target(level))
#define HVL_TARGET_END _Pragma("GCC pop_options")
#define HVL_WIDEST ",prefer-vector-width=512"
// Vectors wider than the baseline's registers are passed only to HVL_ALWAYS_INLINE functions, so their calling
// convention does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#if defined(__x86_64__) && !defined(HVL_NO_DISPATCH)
#define HVL_X86_DISPATCH 1
#include <cpuid.h>
#include <immintrin.h>
#define HVL_TARGET_SHA __attribute__((target("sha,sse4.1")))
#define HVL_AVX2 "avx2,f16c"
#define HVL_AVX512 HVL_AVX2 ",avx512f,avx512bw,avx512dq,avx512vl" HVL_WIDEST
#define HVL_TARGET_AVX2 HVL_TARGET(HVL_AVX2)
#define HVL_TARGET_AVX512 HVL_TARGET(HVL_AVX512)
#else
#define HVL_X86_DISPATCH 0
#endif
#if defined(__aarch64__)
#define HVL_NEON 1  // every AArch64 processor has it
#include <arm_neon.h>
#else
#define HVL_NEON 0
#endif

#define HVL_ALWAYS_INLINE inline __attribute__((always_inline))

namespace hvl {

enum class CpuLevel { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

constexpr bool kDispatch = HVL_X86_DISPATCH != 0;

#if HVL_X86_DISPATCH
// The registers that CPUID returns for a leaf; zeros if the processor does not have the leaf. (__builtin_cpu_supports()
// needs a table that the runtime libraries of some compilers do not have.)
struct CpuId {
  explicit CpuId(unsigned leaf) { __get_cpuid_count(leaf, 0, &eax, &ebx, &ecx, &edx); }
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

constexpr bool has_all(unsigned value, unsigned bits) { return (value & bits) == bits; }

// A bit for each kind of register that the operating system saves at a context switch.
inline unsigned saved_registers() {
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}
#endif

// The best level of this processor that this build has code for.
inline CpuLevel cpu_level() {
#if HVL_X86_DISPATCH
  constexpr unsigned kYmm = 0x6, kZmm = 0xe6;
  const CpuId basic(1), extended(7);
  if (!has_all(basic.ecx, bit_OSXSAVE | bit_AVX | bit_F16C)) return CpuLevel::kBaseline;
  if (!has_all(extended.ebx, bit_AVX2) || !has_all(saved_registers(), kYmm)) return CpuLevel::kBaseline;
  const bool avx512 = has_all(extended.ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL);
  return avx512 && has_all(saved_registers(), kZmm) ? CpuLevel::kAvx512 : CpuLevel::kAvx2;
#else
  return CpuLevel::kBaseline;
#endif
}

inline bool has_sha_instructions() {
#if HVL_X86_DISPATCH
  return has_all(CpuId(1).ecx, bit_SSE4_1 | bit_SSSE3) && has_all(CpuId(7).ebx, bit_SHA);
#else
  return false;
#endif
}

constexpr size_t kLine = 64;
constexpr size_t kPrefetchAhead = 1024;  // bytes: the distance ahead in a loop over arrays

// Prefetches memory that will be written: a line from another processor's cache arrives in exclusive state, so that
// writing to it needs no further message.
HVL_ALWAYS_INLINE void prefetch_to_write(const char* memory, size_t num_bytes) {
  for (size_t offset = 0; offset < num_bytes; offset += kLine) {
#if defined(__x86_64__)
    // The compiler's builtin emits this only for targets that have it; processors without it execute it as a no-op.
    asm volatile("prefetchw %0" : : "m"(memory[offset]));
#else
    __builtin_prefetch(memory + offset, 1);
#endif
  }
}

// Prefetches memory that will be read, into the level 2 cache.
HVL_ALWAYS_INLINE void prefetch_to_read(const char* memory, size_t num_bytes) {
  for (size_t offset = 0; offset < num_bytes; offset += kLine) __builtin_prefetch(memory + offset, 0, 2);
}

}  // namespace hvl
