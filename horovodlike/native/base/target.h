// Everything that depends on the compiler and the processor: run-time dispatch to wider vector instructions,
// prefetching.
//
// A translation unit that begins its code with HVL_TARGET_AVX2 or HVL_TARGET_AVX512 is compiled for that level,
// whatever the flags of the build; it may run only where cpu_level() says so. Everything inline that such a unit emits
// must be its own (templates over a type of an unnamed namespace), or the linker could hand its code to an older
// processor. No ifunc: its resolvers run before a sanitizer is ready. HVL_NO_DISPATCH leaves the baseline alone.
// HVL_TARGET_SHA marks a single function in the same way; its callers check has_sha_instructions().
#pragma once

#include <cstddef>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(HVL_NO_DISPATCH)
#define HVL_X86_DISPATCH 1
#include <cpuid.h>
#include <immintrin.h>
#define HVL_TARGET_SHA __attribute__((target("sha,sse4.1")))
#define HVL_TARGET_AVX2 _Pragma("GCC target(\"avx2,f16c\")")
#define HVL_TARGET_AVX512 \
  _Pragma("GCC target(\"avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512\")")
#else
#define HVL_X86_DISPATCH 0
#define HVL_TARGET_AVX2
#define HVL_TARGET_AVX512
#endif

#if defined(__GNUC__) && !defined(__clang__)
// Vectors wider than the baseline's registers are passed only to HVL_ALWAYS_INLINE functions, so their calling
// convention does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#define HVL_ALWAYS_INLINE inline __attribute__((always_inline))

namespace hvl {

enum class CpuLevel { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

constexpr bool kDispatch = HVL_X86_DISPATCH != 0;

// The best level of this processor that this build has code for.
inline CpuLevel cpu_level() {
#if HVL_X86_DISPATCH
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return CpuLevel::kBaseline;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return avx512 ? CpuLevel::kAvx512 : CpuLevel::kAvx2;
#else
  return CpuLevel::kBaseline;
#endif
}

inline bool has_sha_instructions() {
#if HVL_X86_DISPATCH
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & bit_SSE4_1) == 0 || (ecx & bit_SSSE3) == 0) return false;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_SHA) != 0;
#else
  return false;
#endif
}

constexpr size_t kLine = 64;
constexpr size_t kPrefetchAhead = 1024;  // bytes: the distance ahead in a loop over arrays

// Begins to fetch memory that will be written: a line from another processor's cache arrives in exclusive state, so
// that writing it needs no further message.
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

// Begins to fetch memory that will be read, into the level 2 cache.
HVL_ALWAYS_INLINE void prefetch_to_read(const char* memory, size_t num_bytes) {
  for (size_t offset = 0; offset < num_bytes; offset += kLine) __builtin_prefetch(memory + offset, 0, 2);
}

}  // namespace hvl
