// Fetching cache lines before they are needed.
#pragma once

#include <cstddef>

#include "base/target.h"

namespace hvl {

constexpr size_t kLine = 64;
constexpr size_t kPrefetchAhead = 1024;  // bytes: how far to be ahead in a loop over arrays

// Begins to fetch memory that is to be written: from another processor's cache it comes as this one's own, so that
// writing needs no further message.
HVL_ALWAYS_INLINE void prefetch_to_write(const char* memory, size_t num_bytes) {
  for (size_t offset = 0; offset < num_bytes; offset += kLine) {
#if defined(__x86_64__)
    // The compiler's builtin emits this only if told that the processor has it; those without take it for no operation.
    asm volatile("prefetchw %0" : : "m"(memory[offset]));
#else
    __builtin_prefetch(memory + offset, 1);
#endif
  }
}

// Begins to fetch memory that is to be read, into the level 2 cache.
HVL_ALWAYS_INLINE void prefetch_to_read(const char* memory, size_t num_bytes) {
  for (size_t offset = 0; offset < num_bytes; offset += kLine) __builtin_prefetch(memory + offset, 0, 2);
}

}  // namespace hvl
